"""The effective receptive field: what the centre of the last map sees (vision-ttt Sec. 6, Fig. 8).

The paper has pictures of it, and leaves open the size and the number of the images, and the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..models.backbones import HViT3
from ..models.timm import PlainClassifier, StagedClassifier
from .models import backbone_of

SHARES = (0.2, 0.5, 0.99)


@dataclass(frozen=True)
class ReceptiveField:
    """What the centre cell of the last map sees.

    Attributes:
        field: `(H, W)`, the largest of it 1.
        map_size: (h, w) of the last map, whose centre cell is (h // 2, w // 2).
    """

    field: Tensor
    map_size: tuple[int, int]

    def sides(self, shares: Sequence[float] = SHARES) -> list[float]:
        """Sides in pixels of the smallest squares that hold these shares, in (0, 1], of the sum.

        Their middle is that of the centre cell. They may reach over the image's border, where there
        is nothing.
        """
        # Of each pixel the side of the square that just holds it.
        rows, columns = (
            2 * (torch.arange(n, dtype=torch.float64) + 0.5 - middle).abs() + 1
            for n, middle in zip(self.field.shape, self.middle, strict=True)
        )
        needed, order = torch.maximum(rows[:, None], columns[None]).flatten().sort()
        held = self.field.flatten().double().cpu()[order].cumsum(0)
        # A little less: for a share of 1 the rounding of the sum counts.
        wanted = held[-1] * torch.tensor(shares, dtype=held.dtype) * (1 - 1e-12)
        return needed[torch.searchsorted(held, wanted)].tolist()

    @property
    def middle(self) -> tuple[float, float]:
        """Row and column, in pixels, of the middle of the centre cell.

        Convolutions with strides look half a cell further up and left.
        """
        row, column = (
            (cells // 2 + 0.5) * pixels / cells
            for pixels, cells in zip(self.field.shape, self.map_size, strict=True)
        )
        return row, column


def receptive_field(model: nn.Module, images: Tensor) -> ReceptiveField:
    """The mean over images of Σ_c |∂s/∂x_c|, s = Σ_f relu(F_f) of the centre cell of the last map.

    relu because the plain sum over channels says nothing behind a LayerNorm: it is constant.

    Args:
        model: See `last_map`; runs in evaluation mode.
        images: `(B, 3, H, W)`, one at a time.

    Raises:
        UsageError: As `last_map`, or nothing in the images changes the centre cell.
    """
    total = torch.zeros_like(images[0, 0])
    training = model.training
    try:
        model.eval()
        for image in images:
            x = image[None].detach().requires_grad_()
            with torch.enable_grad():
                features = last_map(model, x)
                height, width = features.shape[2:]
                seen = features[:, :, height // 2, width // 2].relu().sum()
            total += torch.autograd.grad(seen, x)[0][0].abs().sum(0)
    finally:
        model.train(training)
    if not total.max() > 0:
        raise UsageError('no pixel changes the centre of the last map: are these the weights?')
    return ReceptiveField(total / total.max(), (height, width))


def last_map(model: nn.Module, images: Tensor) -> Tensor:
    """The last map `(B, C, h, w)` of a backbone, normed where it has a norm: the smallest there is.

    Args:
        model: A classifier, detector or segmentor of OpenMMLab, whose backbone is taken, with
            pooled features or maps; a backbone; a model of timm.
        images: `(B, 3, H, W)`.

    Raises:
        UsageError: The model has no map.
    """
    backbone = backbone_of(model)
    if isinstance(model, PlainClassifier | StagedClassifier):
        found = model.forward_features(images)
    elif hasattr(model, 'forward_intermediates'):
        found = model.forward_intermediates(
            images, indices=1, norm=True, output_fmt='NCHW', intermediates_only=True
        )
    elif isinstance(backbone, HViT3) and backbone.out_type == 'avg_featmap':
        found = backbone.stem(images)
        for stage in backbone.stages:
            found = stage(found)
        found = backbone.norm(found.flatten(2)).unflatten(2, found.shape[2:])
    else:
        found = _unpooled(backbone, images)
    found = found[-1] if isinstance(found, tuple | list) else found
    if not isinstance(found, Tensor) or found.dim() != 4:
        raise UsageError(
            f'{type(backbone).__name__} returns no map (B, C, h, w): give a backbone, or a model '
            'of mmdet, mmsegmentation, mmpretrain or timm that has one'
        )
    return found


def _unpooled(backbone: nn.Module, images: Tensor) -> Tensor | Sequence[Tensor]:
    """What a backbone returns; one with mmpretrain's option `out_type` is asked for its maps."""
    out_type = getattr(backbone, 'out_type', None)
    if out_type is None:
        return backbone(images)
    backbone.out_type = 'featmap'
    try:
        return backbone(images)
    finally:
        backbone.out_type = out_type
