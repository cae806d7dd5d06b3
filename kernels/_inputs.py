"""What the public functions of all ops do to their inputs: autocast and the checks of types."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What states and sums are kept in: fp64 for fp64 tokens, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocasting(device: torch.device) -> bool:
    """Whether autocast is on for `device`; never on the meta device, which knows none.

    (`torch.amp.is_autocast_available` would say so, but torch 2.11 cannot trace it.)
    """
    return device.type != 'meta' and torch.is_autocast_enabled(device.type)


def to_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tokens in the autocast dtype where autocast is on; fp64 stays, as in torch's own rules.

    `torch.library.register_autocast` would cast the parameters too, which must stay fp32.
    """
    device = tensors[0].device
    if not autocasting(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def check_tensors(op: str, optional: tuple[str, ...] = (), **tensors: Tensor | None) -> None:
    """Everything is a tensor on the device of the first; the `optional` ones may be None.

    Raises:
        TypeError: not a tensor.
        ValueError: not on the device of the first.
    """
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x is None and name in optional:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f'{op}: {name} must be a tensor, got {type(x).__name__}')
        if x.device != first.device:
            raise ValueError(
                f'{op}: {name} is on {x.device} and {first_name} on {first.device}; move them to '
                'one device'
            )


def check_shape(op: str, name: str, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless `x` has exactly `shape`, which `meaning` spells in letters."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(
            f'{op}: {name} must have shape {meaning} = {tuple(shape)}, got {tuple(x.shape)}'
        )


def check_dtype(op: str, name: str, x: Tensor, dtype: torch.dtype, why: str) -> None:
    """Raises TypeError unless `x` is of `dtype`."""
    if x.dtype != dtype:
        raise TypeError(
            f'{op}: {name} must be {dtype} {why}, got {x.dtype}; convert it with .to({dtype})'
        )
