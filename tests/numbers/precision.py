"""Error of a result, measured by the best that its number type allows.

The truth is the same computation in fp64. What a type can give at best is found in fp64 too: every
number that goes in is moved by one unit roundoff of the type in a random direction, and the answer
moves by its *resolution* in that type. All the growth there is lies in it (conditioning,
cancellation, the length of the sequence), whatever is computed, so a bound is a small number of
resolutions: how often a number is rounded on its way through.

- `ROUNDINGS` of bf16 and fp16, 4: the layers of a mixer round tokens going in and coming out, and
  three to five of them follow on one another; rounding to the nearest costs a third of a unit in
  the mean. An op alone has 2: all that lies between its tokens is kept in fp32.
- `ROUNDINGS` of fp32, 16: there the sums inside round too. Over n terms, in a tree or in blocks,
  that is some log₂ n roundings, 16 for 66 800 tokens.

Three more errors are no matter of growth, and have an allowance of their own:

- A gradient is what a change of its tensor does to ⟨dO, O⟩, a number that is known to u·‖dO‖·‖O‖.
  For tensors named as `cancelling`, whose gradient is a small difference of such numbers (the
  length of a step under a LayerNorm, a bias under a BatchNorm), ‖error‖·‖x‖ may be four times as
  large: two such numbers, through each of two weights.
- Below its smallest normal number a type keeps the digits of that number only.
- torch's convolutions on a CPU sum the gradient of a kernel over the pixels one by one in fp32, 80
  roundings for 66 800: some √n are allowed for the tensors that are named.
"""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROUNDINGS = {torch.float32: 16, torch.bfloat16: 4, torch.float16: 4}
ROUNDINGS_OF_AN_OP = {torch.float32: 16, torch.bfloat16: 2, torch.float16: 2}
TYPES = tuple(UNIT)
# Numbers of tokens, as maps: 196 are 224 × 224 pixels at patch 16; 4200 and 66 800 are 1333 × 800
# pixels at patch 16 and at patch 4.
MAPS = {1: (1, 1), 15: (3, 5), 63: (7, 9), 196: (14, 14), 4200: (60, 70), 66_800: (200, 334)}
OUTPUT = 'output'
DEVICES = ('cpu', 'cuda') if torch.cuda.is_available() else ('cpu',)

Tensors = Mapping[str, Tensor]
Function = Callable[[dict[str, Tensor]], Tensor]


def evaluate(function: Function, leaves: Tensors, grad: Tensor) -> dict[str, Tensor]:
    """The output, and by name the gradient of every leaf, for the gradient `grad` of the output."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    output = function(dict(leaves))
    grads = torch.autograd.grad(
        output, list(leaves.values()), grad.to(output), allow_unused=True, materialize_grads=True
    )
    return {OUTPUT: output.detach(), **dict(zip(leaves, grads, strict=True))}


def moved(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every number of `x` moved up or down by the most that rounding to `dtype` can do to it."""
    sign = 2.0 * torch.randint(0, 2, x.shape, generator=generator) - 1
    size = x.abs().clamp_min(torch.finfo(dtype).smallest_normal) * UNIT[dtype]
    return torch.where(x == 0, x, x + sign * size)


class Truth:
    """A function of leaves in fp64, and what its results may be off by in other types."""

    def __init__(self, function: Function, leaves: Tensors, grad: Tensor) -> None:
        self.function = function
        self.leaves = {n: x.detach().double().cpu() for n, x in leaves.items()}
        self.grad = grad.double().cpu()
        self.exact = evaluate(function, self.leaves, self.grad)

    def allowed(
        self,
        dtype: torch.dtype,
        types: Mapping[str, torch.dtype] | None = None,
        cancelling: Collection[str] = (),
        one_by_one: Mapping[str, int] | None = None,
        draws: int = 2,
        roundings: Mapping[torch.dtype, int] = ROUNDINGS,
    ) -> dict[str, float]:
        """Largest allowed ‖result − truth‖, by name.

        Args:
            dtype: The type of the computation.
            types: Other types, by name, of leaves that stay in them.
            cancelling: Leaves whose gradients are small differences.
            one_by_one: Leaves whose gradients are such sums, and of how many terms.
            draws: Random directions to try; the worst counts.
            roundings: Resolutions that are allowed, by type.
        """
        types, one_by_one = types or {}, one_by_one or {}
        away = dict.fromkeys(self.exact, 0.0)
        for seed in range(draws):
            generator = torch.Generator().manual_seed(seed)
            near = {n: moved(x, types.get(n, dtype), generator) for n, x in self.leaves.items()}
            other = evaluate(self.function, near, moved(self.grad, dtype, generator))
            away = {n: max(d, (other[n] - self.exact[n]).norm().item()) for n, d in away.items()}
        unit, least = UNIT[dtype], torch.finfo(dtype).smallest_normal
        loss = unit * self.grad.norm().item() * self.exact[OUTPUT].norm().item()
        allowed = {}
        for name, x in self.exact.items():
            size = self.leaves[name].norm().item() if name in cancelling else 0.0
            lost = 4 * loss / size if size else 0.0
            own = unit * (x.norm().item() + least * x.numel() ** 0.5)
            allowed[name] = roundings[dtype] * (away[name] + own + lost)
            allowed[name] += UNIT[torch.float32] * one_by_one.get(name, 0) ** 0.5 * x.norm().item()
        return allowed

    def assert_near(self, found: Tensors, dtype: torch.dtype, skip=(), **options) -> None:
        """Every result is as near to the truth as `dtype` allows; see `allowed` for the options."""
        assert found.keys() == self.exact.keys()
        allowed, wrong = self.allowed(dtype, **options), {}
        for name, x in self.exact.items():
            if name in skip:
                continue
            # Where the truth is beyond the range of a type, infinity is right: both are its end.
            y, end = found[name].double().cpu(), torch.finfo(found[name].dtype).max
            assert y[x.abs() < end / 2].isfinite().all(), f'{dtype}: {name} is not finite'
            off = (y.clamp(-end, end) - x.clamp(-end, end)).norm().item()
            if not off <= allowed[name]:
                wrong[name] = f'{off / max(allowed[name], 1e-300):.2g}'
        assert not wrong, f'{dtype}, times the allowance: {wrong}'
