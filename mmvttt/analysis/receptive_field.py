"""Effective receptive fields of a backbone's last map and of an FPN's levels (vision-ttt Fig. 8).

The paper shows pictures without image size, number of images and scale (Sec. 6).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..models.backbones import HViT3
from ..models.timm import Classifier
from .mixers import backbone_of, evaluating, out_of_memory

SHARES = (0.2, 0.5, 0.99)


@dataclass(frozen=True)
class ReceptiveField:
    """The pixels that the centre cell of a map depends on.

    Attributes:
        field: `(H, W)`, its maximum 1.
        map_size: (h, w) of the map, whose centre cell is (h // 2, w // 2).
    """

    field: Tensor
    map_size: tuple[int, int]

    def sides(self, shares: Sequence[float] = SHARES) -> list[float]:
        """Sides in pixels of the smallest squares that hold these shares, in (0, 1], of the sum.

        They are centred on the centre cell and may reach over the image's border.
        """
        # Side of the smallest square that contains each pixel.
        rows, columns = (
            2 * (torch.arange(n, dtype=torch.float64) + 0.5 - middle).abs() + 1
            for n, middle in zip(self.field.shape, self.middle, strict=True)
        )
        needed, order = torch.maximum(rows[:, None], columns[None]).flatten().sort()
        held = self.field.flatten().double().cpu()[order].cumsum(0)
        # A little less, because of the sum's rounding for a share of 1.
        bounds = held[-1] * torch.tensor(shares, dtype=held.dtype) * (1 - 1e-12)
        return needed[torch.searchsorted(held, bounds)].tolist()

    @property
    def middle(self) -> tuple[float, float]:
        """Row and column of the centre cell's middle, in pixels.

        Strided convolutions look half a cell further up and left.
        """
        row, column = (
            (cells // 2 + 0.5) * pixels / cells
            for pixels, cells in zip(self.field.shape, self.map_size, strict=True)
        )
        return row, column


def receptive_fields(model: nn.Module, images: Tensor) -> dict[str, ReceptiveField]:
    """Mean over images of Σ_c |∂s/∂x_c|, s = Σ_f relu(F_f) of the centre cell of a map F.

    relu because a plain sum over the channels of a LayerNorm is constant, and its gradient 0.

    Args:
        model: See `feature_maps`. It runs in evaluation mode.
        images: `(B, 3, H, W)`, run one at a time.

    Returns:
        A field for each map of `feature_maps`.
    """
    totals: dict[str, Tensor] = {}
    sizes: dict[str, tuple[int, int]] = {}
    try:
        with evaluating(model), torch.enable_grad():
            for image in images:
                x = image[None].detach().requires_grad_()
                maps = feature_maps(model, x)
                for name, map_ in maps.items():
                    height, width = sizes[name] = tuple(map_.shape[2:])
                    seen = map_[:, :, height // 2, width // 2].relu().sum()
                    gradient = torch.autograd.grad(seen, x, retain_graph=True)[0]
                    totals[name] = totals.get(name, 0) + gradient[0].abs().sum(0)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(images) from error
    for name, total in totals.items():
        if not total.max() > 0:
            raise UsageError(
                f'no pixel changes the centre of {name}: are these the weights of this model?'
            )
    return {name: ReceptiveField(t / t.max(), sizes[name]) for name, t in totals.items()}


def feature_maps(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The maps `(B, C, h, w)` of `last_map`, 'backbone', and of each level of a model's neck, 'P…'.

    An FPN's levels are named by their stride s, P(log2 s): P2 to P6 for strides of 4 to 64.
    """
    if not (hasattr(model, 'extract_feat') and getattr(model, 'with_neck', False)):
        return {'backbone': last_map(model, images)}
    features = model.backbone(images)
    levels = model.neck(features)
    if not isinstance(levels, tuple | list) or levels[0].dim() != 4:
        return {'backbone': last_map(model, images)}
    names = [f'P{math.log2(images.shape[2] / x.shape[2]):.0f}' for x in levels]
    return {'backbone': features[-1], **dict(zip(names, levels, strict=True))}


def last_map(model: nn.Module, images: Tensor) -> Tensor:
    """Returns the last (smallest) map `(B, C, h, w)` of a backbone, normed where it has a norm.

    Args:
        model: A classifier, detector or segmentor of OpenMMLab, whose backbone is taken, with
            pooled features or maps, a backbone, or a timm model.
        images: `(B, 3, H, W)`.
    """
    backbone = backbone_of(model)
    if isinstance(model, Classifier):
        last = model.forward_features(images)
    elif hasattr(model, 'forward_intermediates'):
        last = model.forward_intermediates(
            images, indices=1, norm=True, output_fmt='NCHW', intermediates_only=True
        )
    elif isinstance(backbone, HViT3) and backbone.out_type == 'avg_featmap':
        *_, last = backbone.maps(images, len(backbone.stages))
        last = backbone.norm(last)
    else:
        # mmpretrain's `out_type` may pool the maps.
        unpooled: Any = copy.copy(backbone)
        if hasattr(backbone, 'out_type'):
            unpooled.out_type = 'featmap'
        last = unpooled(images)
    last = last[-1] if isinstance(last, tuple | list) else last
    if not isinstance(last, Tensor) or last.dim() != 4:
        raise UsageError(
            f'{type(backbone).__name__} returns no map (B, C, h, w): give a backbone, or a model '
            'of mmdet, mmsegmentation, mmpretrain or timm that has one'
        )
    return last
