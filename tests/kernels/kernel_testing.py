"""What the tests of all kernels share: gradients by name, errors, and sizes for a rehearsal."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

# Sizes and repetitions shrink where a stand-in device rehearses the tests for a GPU.
REHEARSING = os.environ.get('TTT_KERNELS_REHEARSAL') == '1'


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
    **options: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients by name, for the same random gradient on any device and in any dtype."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items() if x is not None}
    output = function({**inputs, **leaves}, *args, **options)
    grad = normal(torch.Generator().manual_seed(seed), *output.shape).to(output)
    grads = torch.autograd.grad(output, list(leaves.values()), grad)
    return output.detach(), dict(zip(leaves, grads, strict=True))


def error(x: Tensor, y: Tensor) -> float:
    """Largest difference over the largest value of `y`."""
    x, y = x.double().cpu(), y.double().cpu()
    return ((x - y).abs().max() / y.abs().max().clamp_min(1e-30)).item()


def assert_same(found: tuple, expected: tuple, tolerance: float) -> None:
    """Compares two results of `with_gradients`."""
    (output, grads), (expected_output, expected_grads) = found, expected
    assert error(output, expected_output) < tolerance
    assert grads.keys() == expected_grads.keys()
    wrong = {n: error(g, expected_grads[n]) for n, g in grads.items()}
    assert all(e < tolerance for e in wrong.values()), wrong
