"""mmcv's deformable convolutions (TOOD, VFNet, RepPoints, DyHead, DCN) by torchvision's.

Offsets `(B, 2·G·kH·kW, H', W')` are y and x of every tap in both packages, masks `(B, G·kH·kW, H',
W')`; G are the deformable groups. Without masks it is Dai et al. 2017, with them Zhu et al. 2019.
Half types are computed in fp32, like RoIAlign's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_FORWARD, _BACKWARD = 'deform_conv2d', '_deform_conv2d_backward'
# As mmcv names what its two convolutions are called with: of height, then of width.
_PLAIN = ('dH', 'dW', 'padH', 'padW', 'dilationH', 'dilationW', 'group', 'deformable_group')
_MODULATED = (
    *('stride_h', 'stride_w', 'pad_h', 'pad_w', 'dilation_h', 'dilation_w'),
    *('group', 'deformable_group'),
)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """fp32, or fp64: torchvision's kernels want one type for all, which half types would round."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return tuple(t.to(dtype) for t in tensors)


def deform_conv_forward(
    input: Tensor, weight: Tensor, offset: Tensor, output: Tensor, *_: Tensor, **sizes: int
) -> None:
    """Writes the convolution of `(B, C, H, W)` at moved taps to `output` `(B, C', H', W')`."""
    output.copy_(_run(_FORWARD, (input, weight, offset), sizes, _PLAIN))


def deform_conv_backward_input(*tensors: Tensor, **sizes: int) -> None:
    """Writes the gradients of input and offsets."""
    input, offset, grad_output, grad_input, grad_offset, weight, _ = tensors
    found = _run(_BACKWARD, (grad_output, input, weight, offset), sizes, _PLAIN)
    grad_input.copy_(found[0])
    grad_offset.copy_(found[2])


def deform_conv_backward_parameters(*tensors: Tensor, scale: float, **sizes: int) -> None:
    """Adds `scale` times the gradient of the weights to its buffer."""
    input, offset, grad_output, grad_weight, *_ = tensors
    # Nothing of the weights but their shape is in it.
    found = _run(_BACKWARD, (grad_output, input, grad_weight, offset), sizes, _PLAIN)
    grad_weight.add_(found[1].to(grad_weight), alpha=scale)


def modulated_deform_conv_forward(*tensors: Tensor, with_bias: bool, **sizes: int) -> None:
    """Writes the convolution whose taps are moved and weighted to `output` `(B, C', H', W')`."""
    input, weight, bias, _, offset, mask, output, _ = tensors
    added, size = bias if with_bias else None, output.shape[2:]
    offset, mask = _as_read(offset, size), _as_read(mask, size)
    output.copy_(_run(_FORWARD, (input, weight, offset), sizes, _MODULATED, mask, added))


def modulated_deform_conv_backward(*tensors: Tensor, with_bias: bool, **sizes: int) -> None:
    """Writes the gradients of input, weights, bias, offsets and masks."""
    input, weight, _, _, offset, mask, _, *buffers, grad_output = tensors
    grad_input, grad_weight, grad_bias, grad_offset, grad_mask = buffers
    size = grad_output.shape[2:]
    offset, mask = _as_read(offset, size), _as_read(mask, size)
    found = _run(_BACKWARD, (grad_output, input, weight, offset), sizes, _MODULATED, mask)
    grad_input.copy_(found[0])
    grad_weight.copy_(found[1])
    for buffer, gradient in ((grad_offset, found[2]), (grad_mask, found[3])):
        flat = buffer.new_zeros(len(buffer), buffer[0].numel())
        flat[:, : gradient[0].numel()] = gradient.flatten(1)
        buffer.copy_(flat.view(buffer.shape))
    if with_bias:
        grad_bias.copy_(grad_output.sum((0, 2, 3)))


def _as_read(x: Tensor, size: torch.Size) -> Tensor:
    """`(B, N, …)` as `(B, N, H', W')`, the beginning of each image's numbers.

    mmcv's kernels read offsets and masks of a larger map so; DyHead hands them one level's for the
    next, smaller one.
    """
    if x.shape[2:] == size:
        return x
    count = x.shape[1] * size.numel()
    return x.flatten(1)[:, :count].reshape(len(x), x.shape[1], *size)


def _run(
    name: str,
    tensors: Sequence[Tensor],
    sizes: dict[str, int],
    names: Sequence[str],
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Any:
    """The output, or the gradients of input, weights, offsets, masks and bias."""
    import torchvision  # noqa: F401  (registers the operators)

    *_, input, weight, _ = tensors
    # torchvision wants a mask and a bias, whether they are used or not.
    filled = input.new_zeros(len(input), 1) if mask is None else mask
    bias = input.new_zeros(len(weight)) if bias is None else bias
    operator = getattr(torch.ops.torchvision, name)
    given = (sizes[n] for n in names)
    return operator(*widened(*tensors, filled, bias), *given, mask is not None)
