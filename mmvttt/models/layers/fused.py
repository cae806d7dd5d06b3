"""Parts of a block that a GPU computes in one kernel: residual sums and norms, gates, GELUs.

Elsewhere, and for layers that the kernel does not compute, the layers themselves run.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttt_kernels

from .conv import DWConv2d
from .precision import at_least_fp32
from .rope import rotate


def add_and_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + branch and its norm, tokens `(B, N, C)`."""
    if not _fuses(x, norm):
        y = x + branch
        return y, norm(y)
    learned = at_least_fp32(norm.weight), at_least_fp32(norm.bias)
    dtype = _norm_dtype(torch.promote_types(x.dtype, branch.dtype), x.device)
    return ttt_kernels.residual_norm(x, branch, *learned, eps=norm.eps, dtype=dtype)


def norm_alone(x: Tensor, norm: nn.Module) -> Tensor:
    """The norm of tokens `(B, N, C)`."""
    if not _fuses(x, norm):
        return norm(x)
    learned = at_least_fp32(norm.weight), at_least_fp32(norm.bias)
    return ttt_kernels.layer_norm(x, *learned, eps=norm.eps, dtype=_norm_dtype(x.dtype, x.device))


def conv_and_norm(
    x: Tensor, conv: DWConv2d, norm: nn.Module, hw: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """x + conv(x) and its norm, tokens `(B, h·w, C)` of an `(h, w)` map."""
    if not (_fuses(x, norm) and _is_3x3(conv)):
        y = x + conv(x, hw)
        return y, norm(y)
    return ttt_kernels.conv_norm(
        x,
        *_learned(conv),
        at_least_fp32(norm.weight),
        at_least_fp32(norm.bias),
        hw=hw,
        eps=norm.eps,
        dtype=_norm_dtype(x.dtype, x.device),
    )


def sum_and_gate(x: Tensor, gate: Tensor, act: nn.Module, backend: str | None) -> Tensor:
    """Σ_r x_r times the activated gate, branches `(B, N, R, C)` and gate `(B, N, C)`."""
    known = _known_act(act) if backend != 'reference' and x.dtype == gate.dtype else None
    if not (known and ttt_kernels.fuses('gated', x)):
        # Not x.sum(2), which does not run in vectors on a CPU.
        return reduce(torch.add, x.unbind(2)) * act(gate)
    return ttt_kernels.gated(x, gate, activation=known)


def glu(x: Tensor, linear: nn.Module, act: nn.Module) -> Tensor:
    """act(a)·v of linear(x) = [a, v], halves of the channels; tokens `(B, N, C)`."""
    known = _known_act(act)
    if not (known and ttt_kernels.fuses('gated', x)):
        gate, value = linear(x).chunk(2, -1)
        return act(gate) * value
    return ttt_kernels.glu(*_bias_apart(x, linear), activation=known)


def linear_and_act(x: Tensor, linear: nn.Module, act: nn.Module) -> Tensor:
    """act(linear(x)), tokens `(B, N, C)`."""
    known = _known_act(act)
    if not (known and ttt_kernels.fuses('gated', x)):
        return act(linear(x))
    x, bias = _bias_apart(x, linear)
    return act(x) if bias is None else ttt_kernels.biased_act(x, bias, activation=known)


def act_conv_act(x: Tensor, act: nn.Module, conv: DWConv2d, hw: tuple[int, int]) -> Tensor:
    """act(a + conv(a)), a = act(x), tokens `(B, h·w, C)` of an `(h, w)` map."""
    known = _known_act(act) == 'gelu' and _is_3x3(conv)
    if not (known and ttt_kernels.fuses('gelu_conv', x)):
        x = act(x)
        return act(x + conv(x, hw))
    return ttt_kernels.gelu_conv(x, *_learned(conv), hw=hw)


def rotate_pairs(x: Tensor, rotation: Tensor, backend: str | None) -> Tensor:
    """Pairs of channels of tokens `(B, N, C)`, turned by `(N, C / 2)` of `rotation_2d`."""
    # Exporters translate the op better than products of complex numbers.
    fuses = ttt_kernels.fuses('rotate', x) or torch.compiler.is_exporting()
    if backend == 'reference' or not fuses:
        return rotate(x, rotation)
    return ttt_kernels.rotate(x, rotation)


def shares_product(x: Tensor, backend: str | None, *layers: nn.Module) -> bool:
    """Whether linear layers of the same tokens are computed as one product."""
    plain = all(_is_plain(layer, nn.Linear) for layer in layers)
    return plain and backend != 'reference' and ttt_kernels.fuses('gated', x)


def one_product(x: Tensor, *groups: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tokens `(B, N, C)` times weights `(D_i, C)`, one part of one product for each group of them.

    Its width is a multiple of 16, which keeps the tokens of the parts aligned.
    """
    sizes = [sum(map(len, group)) for group in groups]
    # Any rows fill it up.
    more = groups[0][0][: -sum(sizes) % 16].detach()
    weight = torch.cat([*chain(*groups), more])
    return F.linear(x, weight).split([*sizes, len(more)], -1)[:-1]


def _fuses(x: Tensor, norm: nn.Module) -> bool:
    return _is_plain(norm, nn.LayerNorm) and ttt_kernels.fuses('residual_norm', x)


def _bias_apart(x: Tensor, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """A layer's output without its bias, and the bias, where training sums the bias's gradient."""
    bias = linear.bias if _is_plain(linear, nn.Linear) else None
    if bias is None or not (bias.requires_grad and torch.is_grad_enabled()):
        return linear(x), None
    return F.linear(x, linear.weight), at_least_fp32(bias)


def _is_3x3(conv: nn.Module) -> bool:
    return _is_plain(conv, DWConv2d) and conv.kernel_size == (3, 3)


def _learned(conv: DWConv2d) -> tuple[Tensor, Tensor | None]:
    """Weight `(C, 3, 3)` and bias `(C,)`, in the precision of the ops."""
    bias = None if conv.bias is None else at_least_fp32(conv.bias)
    return at_least_fp32(conv.weight).squeeze(1), bias


def _known_act(act: nn.Module) -> str | None:
    """The op's name of an activation, if it has one."""
    if _is_plain(act, nn.GELU) and act.approximate == 'none':
        return 'gelu'
    return 'silu' if _is_plain(act, nn.SiLU) else None


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is exactly of this class and has no hooks."""
    return type(module) is kind and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    )


def _norm_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Input dtype of the linear layers after a norm: autocast's, if it is on."""
    on = torch.is_autocast_enabled(device.type) and dtype != torch.float64
    return torch.get_autocast_dtype(device.type) if on else dtype
