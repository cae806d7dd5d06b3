"""A stub of mmcv's compiled extension, for mmcv-lite: operators of torchvision and our own.

mmcv-lite has all of mmcv's Python, and lacks `mmcv._ext`. The functions have the signatures of
mmcv's extension, with output buffers from the caller.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from mmvttt.errors import OptionError

EXT = 'mmcv._ext'


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """fp32, or fp64: torchvision's kernels need one dtype, and half precision rounds boxes."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return tuple(t.to(dtype) for t in tensors)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices of the kept boxes `(N, 4)`, best score first. A box is x2 - x1 + offset wide."""
    from torchvision.ops import nms as torchvision_nms

    boxes, scores = widened(boxes, scores)
    if offset:
        boxes = boxes + boxes.new_tensor([0, 0, offset, offset])
    return torchvision_nms(boxes, scores, iou_threshold)


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, *_: Tensor, **options: Any
) -> None:
    """Writes RoIAlign of `input` `(N, C, H, W)` at `rois` `(K, 5)` to `output` `(K, C, h, w)`.

    Raises:
        ValueError: On a CPU: a box is not finite, or of an image that the batch does not have.
    """
    _check_rois(rois, len(input))
    output.copy_(_roi_align('roi_align', input, rois, (), **options))


def roi_align_backward(*tensors: Tensor, **options: Any) -> None:
    """Writes the gradient `(N, C, H, W)` of RoIAlign's input to the last of the tensors."""
    grad_output, rois, *_, grad_input = tensors
    grad_input.copy_(
        _roi_align('_roi_align_backward', grad_output, rois, grad_input.shape, **options)
    )


def _check_rois(rois: Tensor, images: int) -> None:
    """On a CPU torchvision would read outside the tensor and crash."""
    if not rois.is_cpu or torch.jit.is_tracing() or torch.compiler.is_compiling():
        return
    indices = rois[:, 0]
    wrong = ~rois.isfinite().all(1) | (indices < 0) | (indices >= images)
    if wrong.any():
        box = int(wrong.nonzero()[0])
        raise OptionError(
            f'RoIAlign: box {box} of {len(rois)} is {rois[box].tolist()} (image, x1, y1, x2, y2), '
            f'allowed are finite numbers and the images 0 to {images - 1}: the training may have '
            'diverged, or the boxes are of another batch'
        )


def _roi_align(
    name: str,
    x: Tensor,
    rois: Tensor,
    shape: Sequence[int],
    *,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> Tensor:
    import torchvision  # noqa: F401  (registers the operators)

    if pool_mode != 1:
        raise NotImplementedError(
            "RoIAlign with pool_mode='max' is not served without a compiled mmcv; "
            "allowed: pool_mode='avg'. Change it in the roi_layer of the config, "
            'or install a compiled mmcv in place of mmcv-lite.'
        )
    size = (aligned_height, aligned_width)
    operator = getattr(torch.ops.torchvision, name)
    return operator(*widened(x, rois), spatial_scale, *size, *shape, sampling_ratio, aligned)


def _focal_loss(
    input: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float
) -> Tensor:
    from torchvision.ops import sigmoid_focal_loss

    if weight.numel():
        raise NotImplementedError(
            'class weights of sigmoid_focal_loss are not served without a compiled mmcv; '
            'leave weight=None, as mmdet does'
        )
    classes = torch.arange(input.shape[1], device=input.device)
    hot = (target[:, None] == classes).to(input.dtype)
    return sigmoid_focal_loss(input, hot, alpha, gamma)


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, *, gamma: float, alpha: float
) -> None:
    """Writes the focal loss of logits `(N, C)` for labels `(N,)`, with C for the background."""
    output.copy_(_focal_loss(input, target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, *, gamma: float, alpha: float
) -> None:
    """Writes the element-wise derivative of the focal loss to `grad_input` `(N, C)`."""
    with torch.enable_grad():
        leaf = input.detach().requires_grad_()
        loss = _focal_loss(leaf, target, weight, gamma, alpha)
        grad_input.copy_(torch.autograd.grad(loss.sum(), leaf)[0])


def ms_deform_attn_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    im2col_step: int,
) -> Tensor:
    """Deformable attention `(B, Q, H·d)` by `ttt_kernels.deform_attn`, without steps.

    The levels are concatenated, as everywhere in OpenMMLab.
    """
    from ttt_kernels import deform_attn

    return deform_attn(value, spatial_shapes, sampling_locations, attention_weights)


def ms_deform_attn_backward(*tensors: Tensor, im2col_step: int) -> None:
    """Writes the gradients of `ms_deform_attn_forward` to the last three of the tensors."""
    from ttt_kernels.deform_attn import gradients

    value, shapes, _, locations, weights, grad_output, *buffers = tensors
    results = gradients(grad_output, value, shapes, locations, weights)
    for buffer, gradient in zip(buffers, results, strict=True):
        buffer.copy_(gradient)


def get_compiler_version() -> str:
    """The compiler of mmcv's extension, for environment reports."""
    return 'none (mmcv-lite)'


SERVED: dict[str, Callable[..., Any]] = {
    'get_compiling_cuda_version': get_compiler_version,
    **{
        f.__name__: f
        for f in (
            nms, roi_align_forward, roi_align_backward,
            sigmoid_focal_loss_forward, sigmoid_focal_loss_backward,
            ms_deform_attn_forward, ms_deform_attn_backward,
            get_compiler_version,
        )
    },
}  # fmt: skip


def _missing(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"mmcv's operator '{name}' needs a compiled mmcv: mmcv-lite is installed, and the stub "
        f'of mmvttt serves only {", ".join(SERVED)}. Use a model that does without it, or replace '
        'mmcv-lite by a compiled mmcv (pip uninstall mmcv-lite, then pip install mmcv).'
    )


class _Stub(ModuleType):
    """The module `mmcv._ext`. mmcv looks up every operator at import. Most are never called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith('__'):
            raise AttributeError(name)
        return SERVED.get(name) or partial(_missing, name)


def offer_stub() -> str | None:
    """Installs the stub, unless mmcv is compiled or missing."""
    mmcv = find_spec('mmcv')
    if mmcv is None:
        return 'mmcv is not installed'
    if PathFinder.find_spec(EXT, mmcv.submodule_search_locations) is not None:
        return 'mmcv is compiled'
    stub = sys.modules.setdefault(EXT, _Stub(EXT))
    stub.__spec__ = ModuleSpec(EXT, None)
    return None
