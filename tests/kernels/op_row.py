"""Rows of the table of ops (ops.py): what a row states, and values that rows share."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from kernel_testing import assert_same, normal, with_gradients
from torch import Tensor

from ttt_kernels._inputs import state_dtype

Inputs = dict[str, Tensor]
HW = tuple[int, int]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Case(NamedTuple):
    """One call: a map, other sizes for `make`, options for `call`."""

    hw: HW
    sizes: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}


class Bad(NamedTuple):
    """A call that raises an error with this word in it: options, and functions of inputs."""

    word: str
    changes: Mapping[str, Any]
    kind: type[Exception] = ValueError


@dataclass(frozen=True)
class Op:
    """One op, or one of its inner models.

    Attributes:
        name: Of the op, as it is in `ttt_kernels` and as its folder is called.
        make: Inputs by name of a map; takes `batch`, `heads`, `dim`, `dtype`, `device` and more.
        call: Output from the inputs, the map, `backend` and options.
        definition: The same by the definition, differentiable, in any precision.
        tokens: Inputs in the type of the tokens, which autocast casts; others are fp32 or fp64.
        images: Inputs with a row for every image.
        variants: Calls without optional inputs.
        cases: Calls that are compared with the definition in fp64.
        kernel_cases: The same for the Triton kernels in the interpreter.
        gpu_cases: The same on a GPU.
        tolerance: Largest error over the largest value, by type, of reference and numba kernel.
        kernel_tolerance: The same of the Triton kernels, which round the operands of products.
        refused: Calls that the Triton kernels refuse, and what the message names.
        bad: Calls that the op refuses, besides those with wrong shapes and dtypes.
        cancelling: Inputs whose gradients are small differences.
        convolved: Inputs whose gradients the reference leaves to torch's convolutions.
        suppressed: Inputs whose gradients vanish for loud tokens: a step damped to a length of 1
            hardly depends on the length of its gradient.
    """

    name: str
    make: Callable[..., Inputs]
    call: Callable[..., Tensor]
    definition: Callable[..., Tensor]
    tokens: tuple[str, ...]
    images: tuple[str, ...]
    cases: tuple[Case, ...]
    kernel_cases: tuple[Case, ...]
    gpu_cases: tuple[Case, ...]
    refused: Mapping[str, Case]
    bad: tuple[Bad, ...]
    # Sums in another order; half types round the results, and nothing else.
    tolerance: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {FP64: 1e-12, FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}
    )
    # Unit roundoffs 2⁻¹¹ and 2⁻⁸ of every operand, a few of them in a row; in fp32 a product is
    # three in tf32, which keep some 21 bits.
    kernel_tolerance: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {FP64: 1e-12, FP32: 4e-5, FP16: 4e-3, BF16: 4e-2}
    )
    cancelling: tuple[str, ...] = ()
    convolved: tuple[str, ...] = ()
    variants: tuple[Case, ...] = ()
    suppressed: tuple[str, ...] = ()

    def cast(self, inputs: Inputs, dtype: torch.dtype, device: str = 'cpu') -> Inputs:
        """The inputs with the tokens in `dtype`, the rest in the type that goes with it."""
        return {
            n: x.to(device, dtype if n in self.tokens else state_dtype(dtype))
            for n, x in inputs.items()
        }

    def check(
        self,
        case: Case,
        dtype: torch.dtype,
        backend: str | None,
        tolerance: Mapping[torch.dtype, float],
        device: str = 'cpu',
    ) -> None:
        """Output and every gradient of a backend against those of the definition in fp64.

        On a GPU against those of the reference, on the CPU: definitions go token by token.
        """
        inputs = self.make(case.hw, dtype=dtype, device=device, **case.sizes)
        options = {'hw': case.hw, **case.options}
        output, grads = with_gradients(self.call, inputs, backend=backend, **options)
        assert output.dtype == dtype
        assert not output.isnan().any()
        assert {n: g.dtype for n, g in grads.items()} == {n: inputs[n].dtype for n in grads}
        # Both sides see the same rounded gradient of the output.
        grad = normal(torch.Generator().manual_seed(1), *output.shape).to(dtype).double()
        exact = {n: x if x is None else x.double().cpu() for n, x in inputs.items()}
        reference = functools.partial(self.call, backend='reference')
        definition = self.definition if device == 'cpu' else reference
        assert_same(
            (output, grads),
            with_gradients(definition, exact, grad=grad, **options),
            tolerance[dtype],
        )


# -------------------------------------------------------------------------------- what rows share

MAPS = tuple(Case(hw) for hw in ((1, 1), (1, 7), (7, 1), (3, 5), (7, 9), (14, 14)))


def no_tokens(word: str, *names: str) -> Bad:
    return Bad(word, dict.fromkeys(names, lambda x: x[:, :0]))
