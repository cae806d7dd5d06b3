"""Compares the kernels of an op with its reference, in the layout of a call: what `_check` runs."""

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import _backend, _check, _launch
from ._op import OPS, Args, Op

# How often the error of the reference in the same precision a kernel may have, twice what the tests
# allow: it sums in another order, and in half precision it rounds the operands of its products. On
# a GPU a product of fp32 is three of TF32, which keep 21 of 24 bits.
FACTORS = {torch.float32: 32, torch.float16: 8, torch.bfloat16: 8}
# A LayerNorm hides most of a step's length, but not the rounding of the operands behind it.
CANCELLING = 12
# LayerNorm divides a key whose Z hardly varies by its small σ, and enlarges roundings as much. An
# error may therefore reach CONDITION times the largest of MOVES changes of the reference when its
# tokens move by a rounding. (One element for Vittt-T, two images: 9 times the reference's error in
# bf16 on an H200, 18 times in fp16 by the emulation in tests/kernels.)
CONDITION, MOVES = 1.5, 3
GRADIENT = 'the gradient of '


class Examples:
    """Random inputs as models have them, in fp64."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def tokens(self, *shape: int) -> Tensor:
        """`(B, N, …)` of a size between .1 and .4, by image. Neighbours correlate by .9."""
        x = self.normal(*shape)
        for t in range(1, shape[1]):
            x[:, t] = 0.9 * x[:, t - 1] + 0.19**0.5 * x[:, t]
        sizes = torch.linspace(0.1, 0.4, shape[0], dtype=torch.float64)
        return x * sizes.view(-1, *[1] * (len(shape) - 1))


def examples(op: Op, layouts: list[Any]) -> Args:
    """Arguments for these layouts: dense tensors on the CPU."""
    new, args = Examples(), []
    for name, layout in zip(op.names, layouts, strict=True):
        if not isinstance(layout, dict):
            args.append(layout)
            continue
        dtype, shape = getattr(torch, layout['dtype']), layout['shape']
        if name in op.tokens:
            x = new.tokens(*shape)
        elif dtype.is_floating_point:
            mean, deviation = op.typical[name]
            x = mean + deviation * new.normal(*shape)
        else:  # sizes of levels, of which the first has all pixels but one for each other
            x = torch.ones(shape, dtype=dtype)
            x[0, 1] = layouts[0]['shape'][1] - len(x) + 1
        args.append(x.to(dtype))
    return op.arguments._make(args)


def place(x: Any, layout: Any, device: Any) -> Any:
    """The tensor `x` in memory as `layout` says, also at an address that is as little aligned."""
    if not isinstance(layout, dict):
        return x
    shape, stride, start = layout['shape'], layout['stride'], layout['offset']
    size = start + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    memory = torch.zeros(size, dtype=x.dtype, device=device)
    # Expanded dimensions are written once.
    for axis, step in enumerate(stride):
        x = x.narrow(axis, 0, 1) if step == 0 else x
    memory.as_strided(x.shape, stride, start).copy_(x)
    return memory.as_strided(shape, stride, start)


def place_all(op: Op, args: Args, layouts: list[Any], device: Any) -> Args:
    return op.arguments._make(place(x, y, device) for x, y in zip(args, layouts, strict=True))


def compare(op: Op, kernel: ModuleType, layouts: list[Any], batch: int, device: Any) -> str:
    """The verdict on the kernels of a call with some images of these layouts, out of `batch`.

    Every result and gradient, and what an inference has. The norm of an error and the largest one
    are compared with the errors of the reference in the same precision.
    """
    given = examples(op, layouts)
    exact = op.arguments._make(x.double() if _is_float(x) else x for x in given)
    dtype = given[0].dtype
    expected, rounded = (_results(op, op.reference, args) for args in (exact, given))
    placed = place_all(op, given, layouts, device)
    with _launch.planned_for(batch, len(placed[0])):
        results = _results(op, kernel, placed)
    if many := getattr(kernel, 'sums_of_many', None):
        # Three images are one turn of a loop over images.
        sums, of_torch = many(placed)
        if not torch.equal(sums, of_torch):
            return f'the sum of many images {_check.DIFFERS} from that of torch'
    for measure in (_norm, _largest):
        errors = {n: measure(x - expected[n]) / measure(expected[n]) for n, x in rounded.items()}
        least = max(torch.finfo(dtype).eps / 2, *(errors[n] for n in errors if 'result' in n))
        for n, x in results.items():
            bound = FACTORS[dtype] * max(errors[n], least)
            bound *= CANCELLING if n.removeprefix(GRADIENT) in op.cancelling else 1
            off = measure(x.cpu() - expected[n]) / measure(expected[n])
            if off > bound:
                by_moves = max(measure(y[n] - expected[n]) for y in _moved(op, exact, dtype))
                bound = max(bound, CONDITION * by_moves / measure(expected[n]))
            if not off <= bound:  # also NaN
                return f'{n} {_check.DIFFERS} from the reference by {off:.1e}, at most {bound:.1e}'
    return _check.AGREES


def _moved(op: Op, args: Args, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Results of the reference for tokens whose numbers move by at most half of ε, relatively."""
    for seed in range(MOVES):
        generator = torch.Generator().manual_seed(seed)
        moved = {}
        for name in op.tokens:
            x = getattr(args, name)
            noise = torch.rand(x.shape, generator=generator, dtype=x.dtype) - 0.5
            moved[name] = x * (1 + torch.finfo(dtype).eps * noise)
        yield _results(op, op.reference, args._replace(**moved))


def _norm(x: Tensor) -> float:
    return x.double().norm().clamp_min(1e-30).item()


def _largest(x: Tensor) -> float:
    return x.double().abs().max().clamp_min(1e-30).item()


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _results(op: Op, module: Any, args: Args) -> dict[str, Tensor]:
    """Results and gradients by name, for gradients of the results that are the same everywhere."""
    out = op.run(module, args, True)
    named = {f'result {i}': x for i, x in enumerate(out[: op.results]) if x.numel()}
    if op.keeps:
        named['result 0 without a gradient'] = op.run(module, args, False)[0]
    seeds, grads = Examples(), []
    for x in out[: op.results]:
        # Rounded for the reference in fp64 too, if only to bf16.
        grads.append(seeds.normal(*x.shape).bfloat16().to(x) if x.numel() else None)
    needs = [_is_float(args[i]) for i in op.tensors]
    grads_of_args = op.run_backward(module, grads, args, out[op.results :], needs)
    for i, x in zip(op.tensors, grads_of_args, strict=True):
        if x is not None and x.numel():
            named[GRADIENT + op.names[i]] = x
    return named


def answer() -> None:
    """Reads a request of `_check.ask`, and prints the digest of its launches and the verdict."""
    request = json.load(sys.stdin)
    op, device, layouts = OPS[request['op']], torch.device(request['device']), request['args']
    kernel = _backend.load_kernel(op.name)
    if isinstance(kernel, str):
        raise RuntimeError(kernel)
    # Fresh tensors are NaN: what a kernel does not write is seen.
    torch.use_deterministic_algorithms(True, warn_only=True)
    args = place_all(op, examples(op, layouts), layouts, device)
    launches = _check.launches(op, kernel, args, request['batch'])
    verdict = compare(op, kernel, layouts, request['batch'], device)
    print(request['nonce'], launches, verdict, flush=True)
