"""`python -m ttt_kernels check`: a kernel's output and gradients against the reference in fp64."""

from typing import Any

import torch
from torch import Tensor

from . import _backend, _known
from ._check import FAILED, NOT_CHECKED, PASSED
from ._op import OPS, Args, Op

# Least bounds of errors over the largest value, by dtype: kernels round the operands of products,
# the reference does not. A wrong result is off by 1.
BOUNDS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# The bound of a sum that cancels is the error of the reference in the same dtype times this.
FACTOR = 16


class Examples:
    """Random inputs as models have them, in fp64: small tokens, much like their neighbours."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def tokens(self, *shape: int) -> Tensor:
        """`(B, N, …)` of a size between .1 and .4, by image; neighbours correlate by .9."""
        x = self.normal(*shape)
        for t in range(1, shape[1]):
            x[:, t] = 0.9 * x[:, t - 1] + 0.19**0.5 * x[:, t]
        sizes = torch.linspace(0.1, 0.4, shape[0], dtype=torch.float64)
        return x * sizes.view(-1, *[1] * (len(shape) - 1))


def compare(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """How the op's kernel differs from the reference in fp64, or None."""
    op, kernel = OPS[name], _backend.load_kernel(name)
    if isinstance(kernel, str):
        raise RuntimeError(kernel)
    for exact in op.examples(Examples()):
        given = _cast(op, exact, dtype)
        exact = _cast(op, given, torch.float64)
        expected = _results(op, op.reference, exact)
        rounded = _results(op, op.reference, given)
        on_device = tuple(x.to(device) if isinstance(x, Tensor) else x for x in given)
        results = _results(op, kernel, on_device)
        for part, result in results.items():
            bound = max(BOUNDS[dtype], FACTOR * _error(rounded[part], expected[part]))
            off = _error(result, expected[part])
            if not off <= bound:  # also NaN
                shapes = [tuple(x.shape) for x in exact if isinstance(x, Tensor)]
                return f'{part} is off by {off:.1e}, at most {bound:.1e}, for shapes {shapes}'
    return None


def _cast(op: Op, args: Args, dtype: torch.dtype) -> Args:
    """Tokens in a dtype, other tensors in the dtype of states."""
    state = torch.float64 if dtype == torch.float64 else torch.float32
    return tuple(
        x.to(dtype if name in op.tokens else state)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in zip(op.names, args, strict=True)
    )


def _results(op: Op, module: Any, args: Args) -> dict[str, Tensor]:
    """Results and gradients by name, for gradients of the results that are the same everywhere."""
    out = op.run(module, args, True)
    results = [x for x in out[: op.results] if x.numel()]
    seeds = Examples()
    grads: list[Tensor | None] = [seeds.normal(*x.shape).to(x) for x in results]
    grads = [*grads, *[None] * (op.results - len(grads))]
    needs = [args[i] is not None and args[i].is_floating_point() for i in op.tensors]
    grads_of_args = op.run_backward(module, grads, args, out[op.results :], needs)
    named = {f'result {i}': x for i, x in enumerate(results)}
    for i, x in zip(op.tensors, grads_of_args, strict=True):
        if x is not None:
            named[f'the gradient of {op.names[i]}'] = x
    return named


def _error(x: Tensor, exact: Tensor) -> float:
    x, exact = x.double().cpu(), exact.double().cpu()
    return ((x - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()


def main(op: str, dtypes: list[str], device: str) -> int:
    """`python -m ttt_kernels check`: prints what differs; 0 if nothing, 1 if something."""
    target = torch.device('cpu' if _backend.interpreting() else device)
    status = PASSED
    try:
        torch.zeros(1, device=target)
    except Exception as error:  # in use by somebody else
        print(f'{target}: {type(error).__name__}: {error}'.splitlines()[0])
        return NOT_CHECKED
    for name in dtypes:
        try:
            differences = compare(op, _known.DTYPES[name], target)
        except Exception as error:  # of the compiler, of the GPU
            print(f'{op} {name}: {type(error).__name__}: {error}'.splitlines()[0])
            return NOT_CHECKED if isinstance(error, torch.OutOfMemoryError) else FAILED
        print(f'{op} {name}: {differences or "agrees with the reference"}')
        status = max(status, FAILED if differences else PASSED)
    return status
