"""Parts of a block that a GPU computes in one kernel: a residual sum and the norm after it.

Elsewhere, and for layers that the kernel does not compute, the layers themselves run.
"""

import torch
from torch import Tensor, nn

import ttt_kernels

from .conv import DWConv2d
from .precision import at_least_fp32


def add_and_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + branch and its norm, tokens `(B, N, C)`."""
    if not _fuses(x, norm):
        y = x + branch
        return y, norm(y)
    learned = at_least_fp32(norm.weight), at_least_fp32(norm.bias)
    dtype = _norm_dtype(torch.promote_types(x.dtype, branch.dtype), x.device)
    return ttt_kernels.residual_norm(x, branch, *learned, eps=norm.eps, dtype=dtype)


def conv_and_norm(
    x: Tensor, conv: DWConv2d, norm: nn.Module, hw: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """x + conv(x) and its norm, tokens `(B, h·w, C)` of an `(h, w)` map."""
    if not (_fuses(x, norm) and _is_plain(conv, DWConv2d) and conv.kernel_size == (3, 3)):
        y = x + conv(x, hw)
        return y, norm(y)
    return ttt_kernels.conv_norm(
        x,
        at_least_fp32(conv.weight).squeeze(1),
        None if conv.bias is None else at_least_fp32(conv.bias),
        at_least_fp32(norm.weight),
        at_least_fp32(norm.bias),
        hw=hw,
        eps=norm.eps,
        dtype=_norm_dtype(x.dtype, x.device),
    )


def _fuses(x: Tensor, norm: nn.Module) -> bool:
    return _is_plain(norm, nn.LayerNorm) and ttt_kernels.fuses('residual_norm', x)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is exactly of this class and has no hooks."""
    return type(module) is kind and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    )


def _norm_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Input dtype of the linear layers after a norm: autocast's, if it is on."""
    on = torch.is_autocast_enabled(device.type) and dtype != torch.float64
    return torch.get_autocast_dtype(device.type) if on else dtype
