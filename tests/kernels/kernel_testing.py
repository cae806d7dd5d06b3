"""Shared by the tests of all kernels: gradients by name, errors, the interpreter."""

import functools
import importlib
import operator
import os
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Whether this is the process in which tests marked `interpreter` run.
INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_gradients(
    function: Callable[..., Tensor],
    inputs: dict[str, Tensor | None],
    *args: object,
    seed: int = 1,
    grad: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients by name, for `grad` or one that is random, but the same in any dtype.

    A `grad` of the output's dtype is passed on with its strides.
    """
    # As they lie in memory: views of one projection, as in a model.
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items() if x is not None}
    output = function({**inputs, **leaves}, *args, **options)
    if grad is None:
        grad = normal(torch.Generator().manual_seed(seed), *output.shape)
    grads = torch.autograd.grad(output, list(leaves.values()), grad.to(output))
    return output.detach(), dict(zip(leaves, grads, strict=True))


def error(x: Tensor, y: Tensor) -> float:
    """Largest difference over the largest value of `y`."""
    x, y = x.double().cpu(), y.double().cpu()
    return ((x - y).abs().max() / y.abs().max().clamp_min(1e-30)).item()


def assert_same(found: tuple, expected: tuple, tolerance: float) -> None:
    """Compares two results of `with_gradients`."""
    (output, grads), (expected_output, expected_grads) = found, expected
    assert output.shape == expected_output.shape
    assert error(output, expected_output) < tolerance
    assert grads.keys() == expected_grads.keys()
    wrong = {n: error(g, expected_grads[n]) for n, g in grads.items()}
    assert all(e < tolerance for e in wrong.values()), wrong


class RecordedOps(TorchDispatchMode):
    """Collects the registered ops that are called inside: `(op, arguments, result)` each."""

    def __enter__(self) -> list[tuple[Callable, tuple, object]]:
        super().__enter__()
        self.calls: list[tuple[Callable, tuple, object]] = []
        return self.calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == 'ttt_kernels':
            self.calls.append((func, args, result))
        return result


def opcheck(op: object, backend: str, case: object, dtype: torch.dtype, **options: object) -> None:
    """torch's checks of the registered ops that a forward and a backward pass call."""
    inputs = op.make(case.hw, dtype=dtype, **case.sizes)
    with RecordedOps() as calls:
        with_gradients(op.call, inputs, case.hw, backend=backend, **case.options)
    for function, arguments, _ in calls:
        forward = not function.__name__.startswith(f'{op.name}_backward')
        leaves = [
            x.detach().requires_grad_(forward)
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for x in arguments
        ]
        torch.library.opcheck(function, leaves, **options)


@functools.cache
def triton_modules() -> list[ModuleType]:
    """Modules of ttt_kernels with functions of Triton."""
    from triton.runtime.jit import KernelInterface

    import ttt_kernels

    actual = []
    for module in pkgutil.walk_packages(ttt_kernels.__path__, 'ttt_kernels.'):
        if '_numba' not in module.name and not module.name.endswith('__main__'):
            kernels = importlib.import_module(module.name)
            if any(isinstance(x, KernelInterface) for x in vars(kernels).values()):
                actual.append(kernels)
    return actual


def _assert_no_overflow(semantic: object, left: object, right: object, op: Callable) -> None:
    """Triton's own check of + - × of integers, on NumPy's: in Triton's it takes half the time."""
    dtype = left.type.scalar
    if dtype.int_bitwidth < 64:
        exact = getattr(operator, op.__name__)(
            left.handle.data.astype('int64'), right.handle.data.astype('int64')
        )
        least, most = dtype.get_int_min_value(), dtype.get_int_max_value()
        assert least <= exact.min() <= exact.max() <= most, f'{dtype} overflow: {op.__name__}'


def _precise(dot: Callable) -> Callable:
    """`TritonSemantic.dot`, which in the interpreter is exact, with what a GPU would round seen."""

    def checked(self: object, x: object, y: object, acc: object, precision: str, *args) -> object:
        assert not x.dtype.is_fp32() or precision in ('tf32x3', 'ieee'), 'one TF32 product'
        return dot(self, x, y, acc, precision, *args)

    return checked


@pytest.fixture(autouse=True)
def default_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the choice of a backend to the ops, as outside of the tests."""
    monkeypatch.delenv('TTT_KERNELS_BACKEND', raising=False)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the mini-batches of a segment of ttt_linear."""
    from ttt_kernels import _launch
    from ttt_kernels.ttt_linear import reference

    def set_cut(segment: int) -> None:
        monkeypatch.setattr(reference, 'SEGMENT', segment)
        _launch.forget_plans()

    return set_cut


@pytest.fixture(autouse=INTERPRETING)
def quick_and_poisoned() -> Iterator[None]:
    """Makes the interpreter fast enough, and sees what it hides: fresh tensors are NaN."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    from ttt_kernels import _launch

    # Plans of tests that changed the constants behind them.
    _launch.forget_plans()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    with pytest.MonkeyPatch.context() as patch:
        # Triton's language is patched once a launch, not at every function call.
        function = interpreter.InterpretedFunction
        patch.setattr(function, '__call__', lambda f, *a, **k: f.rewrite()(*a, **k))
        patch.setattr(TritonSemantic, 'binary_op_sanitize_overflow_impl', _assert_no_overflow)
        patch.setattr(TritonSemantic, 'dot', _precise(TritonSemantic.dot))
        for module in triton_modules():
            # A launch patches the modules that it finds here; Triton's own functions use this one.
            patch.setattr(module, 'core', tl.core, raising=False)
        yield
    torch.use_deterministic_algorithms(False)
