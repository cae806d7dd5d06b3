"""Autocast and checks of arguments, for the public functions of all ops."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LETTERS = {'forward': 'f', 'backward': 'b'}
Output = TypeVar('Output')
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of states and sums: fp64 for fp64 tokens, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocasting(device: torch.device) -> bool:
    """Whether autocast is on for `device`. The meta device has no autocast.

    (torch 2.11 cannot trace `torch.amp.is_autocast_available`.)
    """
    return device.type != 'meta' and torch.is_autocast_enabled(device.type)


def to_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts tokens to the autocast dtype where autocast is on. As in torch, fp64 is not cast.

    `torch.library.register_autocast` would cast the parameters too, which must stay fp32.
    """
    device = tensors[0].device
    if not autocasting(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def check_tensors(op: str, tensors: Sequence[tuple[str, Any]]) -> None:
    """Checks that all are dense tensors on the device of the first."""
    first_name, first = tensors[0]
    for name, x in tensors:
        if not isinstance(x, Tensor):
            raise TypeError(f'{op}: {name} must be a tensor, got {type(x).__name__}')
        if x.layout != torch.strided:
            raise TypeError(f'{op}: {name} must be dense, got {x.layout}; use .to_dense()')
        if x.device != first.device:
            raise ValueError(
                f'{op}: {name} is on {x.device} and {first_name} on {first.device}; move them to '
                'one device'
            )


def transformed(*tensors: Tensor | None) -> bool:
    """True if a tensor carries a tangent or is inside `torch.func.grad`.

    A registered op has no rule for either: it drops tangents and raises in `torch.func.grad`.
    """
    if torch.compiler.is_compiling():
        # A traced tensor hides its tangent.
        return forward_ad._current_level >= 0
    given = [x for x in tensors if x is not None]
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in given
    ):
        return True
    return any(map(_differentiated, given))


def _differentiated(x: Tensor) -> bool:
    """True for a tensor that torch.func differentiates with respect to, at any level."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def by_definition(definition: Callable[..., Output], *args: Any) -> Output:
    """Result of `definition` in the op's precision, for derivatives that the op lacks."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    with torch.autocast(device.type, enabled=False) if autocasting(device) else nullcontext():
        return definition(*args)


def gradients_of(
    definition: Callable[..., Any], grads: Sequence[Tensor | None], args: Sequence[Any]
) -> list[Tensor | None]:
    """Gradients of the arguments that require one, which autograd can differentiate again."""
    # Views are distinct, and autograd does not follow one input from another.
    differentiated = [isinstance(x, Tensor) and x.requires_grad for x in args]
    views = [x.view_as(x) if d else x for x, d in zip(args, differentiated, strict=True)]
    out = by_definition(definition, *views)
    outs = out if isinstance(out, tuple) else (out,)
    pairs = [(o, g) for o, g in zip(outs, grads, strict=False) if g is not None]
    inputs = [x for x, d in zip(views, differentiated, strict=True) if d]
    found = iter(
        torch.autograd.grad(
            [o for o, _ in pairs],
            inputs,
            [g for _, g in pairs],
            create_graph=True,
            materialize_grads=True,
        )
    )
    return [next(found) if d else None for d in differentiated]


def direction_letters(op: str, directions: tuple[str, ...], name: str, x: Tensor) -> str:
    """Directions of the scans of `x` `(B, T, R, …)` as a registered op takes them, such as 'fb'."""
    if not isinstance(directions, tuple | list) or len(directions) == 0:
        raise ValueError(
            f"{op}: directions={directions!r}: give a tuple such as ('forward', 'backward')."
        )
    for way in directions:
        if way not in _LETTERS:
            raise ValueError(f"{op}: directions={directions!r}: give 'forward' and 'backward'.")
    if x.shape[2] != len(directions):
        raise ValueError(
            f'{op}: {name} has R = {x.shape[2]} scans for {len(directions)} directions; give one '
            'direction for each scan'
        )
    return ''.join(_LETTERS[way] for way in directions)


def check_number(op: str, name: str, value: float, least: float = -math.inf) -> None:
    """Raises TypeError or ValueError unless `value` is a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
        raise TypeError(f'{op}: {name}={value!r}: give a number.')
    if not (least <= value < math.inf and value > -math.inf):
        bound = '' if least == -math.inf else f' of at least {least}'
        raise ValueError(f'{op}: {name}={value!r}: give a finite number{bound}.')


def check_damped_step(op: str, scale: float, damping: bool) -> None:
    """Checks the options of ViT³'s inner step. A `damping` of 'no' would count as True."""
    check_number(op, 'scale', scale)
    if not isinstance(damping, bool):
        raise TypeError(f'{op}: damping={damping!r}: give True or False.')


def sizes_of(op: str, name: str, x: Tensor, meaning: str, at_least_1: str) -> dict[str, int]:
    """Sizes of `x` by the letters of `meaning`, after checks of its dimensions and dtype.

    Args:
        at_least_1: Letters of sizes that must not be 0, such as 'TRHd'.
    """
    letters = meaning.strip('()').split(', ')
    if x.dim() != len(letters):
        raise ValueError(
            f'{op}: {name} must have shape {meaning}, got {x.dim()} dimensions: {tuple(x.shape)}'
        )
    if x.dtype not in FLOATS:
        raise TypeError(
            f'{op}: {name} must be float32, bfloat16, float16 or float64, got {x.dtype}'
        )
    sizes = dict(zip(letters, x.shape, strict=True))
    for letter in at_least_1:
        if sizes[letter] == 0:
            raise ValueError(
                f'{op}: {letter} must be at least 1, got {name} of shape {tuple(x.shape)}; skip '
                'the call where there is nothing to compute'
            )
    return sizes


def check_shape(op: str, name: str, x: Tensor, meaning: str, sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless `x` has the sizes of the letters of `meaning`."""
    shape = tuple(sizes[letter] for letter in meaning.strip('()').split(', '))
    if tuple(x.shape) != shape:
        raise ValueError(f'{op}: {name} must have shape {meaning} = {shape}, got {tuple(x.shape)}')


def check_dtype(op: str, name: str, x: Tensor, dtype: torch.dtype, why: str) -> None:
    """Raises TypeError unless `x` is of `dtype`."""
    if x.dtype != dtype:
        raise TypeError(
            f'{op}: {name} must be {dtype} {why}, got {x.dtype}; convert it with .to({dtype})'
        )


def check_tokens(op: str, q: Tensor, sizes: Mapping[str, int], **tokens: Tensor) -> None:
    """Checks that the tokens have the sizes and the dtype of `q`."""
    for name, x in tokens.items():
        check_shape(op, name, x, f'({", ".join(sizes)})', sizes)
        check_dtype(op, name, x, q.dtype, 'as q is')


def check_parameters(
    op: str, dtype: torch.dtype, sizes: Mapping[str, int], meaning: str, **parameters: Tensor
) -> None:
    """Checks that parameters have the sizes of `meaning`, and the states' dtype for `dtype`."""
    for name, x in parameters.items():
        check_shape(op, name, x, meaning, sizes)
        check_dtype(op, name, x, state_dtype(dtype), f'where the tokens are {dtype}')


def check_inner_step(op: str, q: Tensor, k: Tensor, v: Tensor, **weights: Tensor) -> None:
    """Checks tokens `(B, N, H, d)` of one shape and dtype, weights `(H, d, d)` in fp32 or fp64."""
    sizes = sizes_of(op, 'q', q, '(B, N, H, d)', 'NHd')
    check_tokens(op, q, sizes, k=k, v=v)
    check_parameters(op, q.dtype, sizes, '(H, d, d)', **weights)
