"""What the tests of all kernels share: gradients by name, errors, the interpreter, rehearsals."""

import importlib
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

# Sizes and repetitions shrink where a stand-in device rehearses the tests for a GPU.
REHEARSING = os.environ.get('TTT_KERNELS_REHEARSAL') == '1'
# Whether this is the process in which tests marked `interpreter` run.
INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'
# Where there are functions of Triton.
KERNEL_MODULES = (
    '_head_tiles',
    '_launch',
    'causal_conv.kernel',
    'deform_attn.kernel',
    'ttt_dwconv.kernel',
    'ttt_glu.kernel',
    'ttt_linear._backward_kernels',
    'ttt_linear._forward_kernels',
    'ttt_linear._tiles',
    'ttt_mlp.kernel',
)


def some(*values: object, rehearsed: int = 1) -> tuple:
    """Values of a test, of which the first ones are enough for a rehearsal."""
    return values[:rehearsed] if REHEARSING else values


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
    """Output and gradients by name, for `grad` or one that is random, but the same in any dtype."""
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


@pytest.fixture(autouse=INTERPRETING)
def quick_and_poisoned() -> Iterator[None]:
    """Makes the interpreter fast enough, and fresh tensors NaN: what is not written is seen."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    with pytest.MonkeyPatch.context() as patch:
        # Triton's language is patched once a launch, not at every function call.
        patch.setattr(InterpretedFunction, '__call__', lambda f, *a, **k: f.rewrite()(*a, **k))
        for module in KERNEL_MODULES:
            # A launch patches the modules that it finds here; Triton's own functions use this one.
            kernels = importlib.import_module(f'ttt_kernels.{module}')
            patch.setattr(kernels, 'core', tl.core, raising=False)
        yield
    torch.use_deterministic_algorithms(False)
