"""ViT-Adapter: a four-level pyramid from any plain backbone (Chen et al., ICLR 2023, Sec. 3)."""

import copy
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmvttt.arguments import check_choice, check_int, check_ints, check_rate
from mmvttt.errors import OptionError, OptionTypeError

from ..backbones import BACKBONES
from ..build import build_part, split_config
from ..layers.conv import map_size, to_map
from ..layers.norms import NormLayer, build_norm
from .deformable_attention import Level, SamplingGrid
from .interaction import Extractor, Injector, Interaction, join_levels, split_levels
from .spatial_prior import SpatialPrior

_STRIDES = (4, 8, 16, 32)
_PATCH = 16
_NUM_GROUPS = 4
# Options of a backbone that only its own forward pass reads.
_WITHOUT_EFFECT = {'out_indices', 'out_type', 'cls_mode'}
_log = logging.getLogger(__name__)


# By the backbone's width: heads of deformable attention, deform_ratio, drop_path_rate.
_DEFAULTS = {192: (6, 1.0, 0.1), 384: (6, 1.0, 0.2), 768: (12, 0.5, 0.3)}


def warn_of_unused(options: Mapping[str, Any]) -> None:
    """Warns of options of a backbone that have no effect in a ViTAdapter."""
    for name in _WITHOUT_EFFECT & options.keys():
        _log.warning(
            'backbone.%s=%r has no effect in a ViTAdapter, which takes the tokens of all blocks: '
            'leave it out, and choose among the maps 0 to 3 by its own out_indices',
            name,
            options[name],
        )


class ViTAdapter(nn.Module):
    """Wraps a plain backbone of patch size 16 and returns maps at strides 4, 8, 16 and 32.

    A spatial prior of convolutions computes a pyramid next to the backbone's tokens. The blocks run
    in groups. Before each group an injector adds the pyramid (strides 8, 16, 32) to the tokens, and
    after it an extractor adds the tokens to the pyramid. All maps have the backbone's `embed_dims`
    channels.

    Defaults by the backbone's `embed_dims`: 192, 384, 768 have 6, 6, 12 heads of deformable
    attention, ratio 1.0, 1.0, 0.5 and drop path .1, .2, .3, as in Vision-RWKV, whose recipes
    Vision-TTT follows (its appendix prints none). Another width has a head per 32 channels, ratio
    1.0 and no drop path.

    Images may have any size: level s has `ceil(H / s)` × `ceil(W / s)` cells, as the convolutions
    and the backbone's padding to whole patches give. Sampling positions are aligned in pixels and
    resized maps are cropped, so that features keep their place if 32 does not divide a side. If it
    does, this is the usual ViT-Adapter.

    The backbone's final norm and class tokens are not used and therefore removed. Loading the
    checkpoint of a classifier reports them as unexpected.

    Args:
        backbone: A plain backbone, which is copied, its name, or `dict(type=…)` with options. It
            has the attributes `embed_dims`, `num_layers`, `patch_size`, `norm`, and the methods
            `embed(image) -> (tokens, (h, w))` and `run_block(i, tokens, (h, w)) -> tokens`. Tokens
            in front of the patches' tokens, as many as `num_prefix_tokens`, bypass the adapter.
            Drop path, frozen stages and checkpointing of the blocks are options of the backbone.
        task: Tokens to add to the pyramid at the end: with 'det' the last ones to all four maps,
            with 'seg' the tokens after interaction 1, 2, 3, 4 to map 1, 2, 3, 4.
        interaction_indexes: First and last block of every group. Default: four even groups
            ([0, 2], [3, 5], [6, 8], [9, 11] of 12).
        deform_ratio: Channels of its values as a fraction of `embed_dims`. Default by width.
        conv_inplane: Width of the spatial prior's stem.
        num_extra_extractors: Extractors after the one of the last interaction.
        drop_path_rate: Stochastic depth of the conv-FFN. Default by width.
        out_indices: Maps to return (0: stride 4 … 3: stride 32).
        freeze_backbone: Train only the adapter. The backbone stays in evaluation mode, and its
            parameters get no gradients, which still pass through it to the injectors.
        with_cp: Recompute injectors and extractors in the backward pass, non-reentrantly.
        norm_layer: Norm layers of the spatial prior and of the outputs, see `build_norm`. 'SyncBN'
            equals 'BN' while no process group exists. In a process group on CPUs it cannot run:
            take 'BN' or `dict(type='GN', num_groups=32)`. Use 'GN' with one image per GPU, or with
            images so small that a level is one cell.
        deform_backend: Implementation of the deformable attention's op: 'triton', 'numba' or
            'reference'. None leaves the choice to it (docs/kernels.md). Mixers have their own
            option.

    Raises:
        TypeError: If `backbone` lacks a part of the contract, or an option has another type.
        ValueError: If an option is out of range, or does not fit the backbone.
    """

    def __init__(
        self,
        backbone: str | Mapping[str, Any] | nn.Module,
        task: str = 'det',
        interaction_indexes: Sequence[Sequence[int]] | None = None,
        deform_ratio: float | None = None,
        conv_inplane: int = 64,
        num_extra_extractors: int = 2,
        drop_path_rate: float | None = None,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        freeze_backbone: bool = False,
        with_cp: bool = False,
        norm_layer: NormLayer = 'SyncBN',
        deform_backend: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(backbone, nn.Module):
            kind, options = split_config('backbone', backbone, BACKBONES)
            backbone = build_part('backbone', kind, **options)
            warn_of_unused(options)
        else:
            # The caller's module keeps its norm and class token.
            backbone = copy.deepcopy(backbone)
        self.backbone = backbone
        _check_backbone(self.backbone)
        # Unused parameters would have no gradients, which stops DDP.
        self.backbone.norm = nn.Identity()
        self.prefix = getattr(self.backbone, 'num_prefix_tokens', 0)
        if hasattr(self.backbone, 'cls_token') and not self.prefix:
            self.backbone.cls_token = None
        dims = self.embed_dims = self.backbone.embed_dims
        self.task = task
        self.interaction_indexes = _groups(interaction_indexes, self.backbone.num_layers)
        check_ints('out_indices', out_indices, 0, len(_STRIDES) - 1)
        if not out_indices:
            raise OptionError('out_indices is empty: name one or more of the maps 0, 1, 2, 3.')
        self.out_indices = tuple(out_indices)
        self.freeze_backbone = freeze_backbone
        check_choice('task', task, ('det', 'seg'))
        if task == 'seg' and len(self.interaction_indexes) != len(_STRIDES):
            raise OptionError(
                f"task 'seg' needs {len(_STRIDES)} interactions, one per map; interaction_indexes "
                f'has {len(self.interaction_indexes)}: {self.interaction_indexes}'
            )

        check_int('conv_inplane', conv_inplane)
        check_int('num_extra_extractors', num_extra_extractors, 0)
        heads, ratio, rate = _DEFAULTS.get(dims, (max(1, dims // 32), 1.0, 0.0))
        ratio = ratio if deform_ratio is None else deform_ratio
        rate = rate if drop_path_rate is None else drop_path_rate
        check_rate('drop_path_rate', rate)
        attention = dict(num_heads=heads, ratio=ratio, backend=deform_backend)
        extractors = [1] * len(self.interaction_indexes)
        extractors[-1] += num_extra_extractors
        # The conv-FFN has a quarter of the channels, as in the original.
        ffn_dims = max(1, round(dims / 4))
        self.interactions = nn.ModuleList(
            Interaction(
                Injector(dims, len(_STRIDES) - 1, attention),
                [Extractor(dims, ffn_dims, rate, attention) for _ in range(count)],
                with_cp,
            )
            for count in extractors
        )
        with_stride4 = 0 in self.out_indices
        self.spatial_prior = SpatialPrior(
            dims,
            conv_inplane,
            norm_layer,
            in_channels=getattr(self.backbone, 'in_channels', 3),
            with_stride4=with_stride4,
        )
        self.level_embed = nn.Parameter(torch.randn(len(_STRIDES) - 1, dims))
        self.norms = nn.ModuleList(
            build_norm(norm_layer, dims) if i in self.out_indices else nn.Identity()
            for i in range(len(_STRIDES))
        )
        if with_stride4:
            self.up = nn.ConvTranspose2d(dims, dims, 2, stride=2)
            # The original's rule for convolutions: fan-out, with four taps.
            nn.init.normal_(self.up.weight, std=(2 / (4 * dims)) ** 0.5)
            nn.init.zeros_(self.up.bias)
        if freeze_backbone:
            self.backbone.requires_grad_(False)
            self.backbone.eval()

    def train(self, mode: bool = True) -> 'ViTAdapter':
        super().train(mode)
        if self.freeze_backbone:
            self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Image `(B, 3, H, W)` → maps `(B, C, ⌈H/s⌉, ⌈W/s⌉)`, s = 4, 8, 16, 32 (`out_indices`)."""
        tokens, hw = self.backbone.embed(x)
        first, *maps = self.spatial_prior(x)
        sizes = [map_size(c) for c in maps]
        pyramid = join_levels(
            [c + e[:, None, None] for c, e in zip(maps, self.level_embed, strict=True)]
        )
        levels = [Level(s, *size) for s, size in zip(_STRIDES[1:], sizes, strict=True)]
        patches = [Level(_PATCH, *hw)]
        dtype = torch.promote_types(x.dtype, torch.float32)
        on_pyramid = SamplingGrid.between(patches, levels, dtype, x.device)
        on_tokens = SamplingGrid.between(levels, patches, dtype, x.device)

        shared = getattr(self.backbone, 'shared_extras', lambda hw: {})(hw)
        stages = []
        for interaction, (start, end) in zip(
            self.interactions, self.interaction_indexes, strict=True
        ):
            patches = interaction.inject(tokens[:, self.prefix :], pyramid, on_pyramid)
            tokens = torch.cat([tokens[:, : self.prefix], patches], 1) if self.prefix else patches
            for i in range(start, end + 1):
                tokens = self.backbone.run_block(i, tokens, hw, **shared)
            stages.append(tokens[:, self.prefix :])
            pyramid = interaction.extract(pyramid, stages[-1], on_tokens, sizes)

        maps = split_levels(pyramid, sizes)
        if first is not None:
            height, width = first.shape[-2:]
            first = first + self.up(maps[0])[..., :height, :width]
        added = stages if self.task == 'seg' else stages[-1:] * len(_STRIDES)
        outs = []
        for i in self.out_indices:
            c = (first, *maps)[i]
            features = to_map(added[i], hw)
            if i == 0:
                # In the layout of `first`: a sum over two layouts is four times slower.
                features = features.contiguous()
            outs.append(self.norms[i](c + _resize(features, _STRIDES[i], c.shape[-2:])))
        return tuple(outs)

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Layer of a parameter and their number, for layer-wise decay of the learning rate.

        Parameters of the backbone have its own layers, and the adapter is part of the last layer,
        which learns at the full rate.
        """
        inner = f'{prefix}backbone.'
        if param_name.startswith(inner):
            return self.backbone.get_layer_depth(param_name, inner)
        num_layers = int(self.backbone.num_layers) + 2
        return num_layers - 1, num_layers

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not decay, beyond norms, biases and 1-D ones."""
        names = getattr(self.backbone, 'no_weight_decay', set)()
        return {'level_embed'} | {f'backbone.{name}' for name in names}


def _resize(features: Tensor, stride: int, size: tuple[int, int]) -> Tensor:
    """Patches' features `(B, C, h, w)`, resized to the grid of `stride` and cropped to `size`."""
    if stride < _PATCH:
        # By a factor, not to a size: the grids may extend over the image's border differently.
        features = F.interpolate(
            features, scale_factor=_PATCH // stride, mode='bilinear', align_corners=False
        )
    elif stride > _PATCH:
        # Bilinear at one half is the mean of 2 × 2. Pooling takes odd sides too.
        features = F.avg_pool2d(features, stride // _PATCH, ceil_mode=True)
    return features[..., : size[0], : size[1]]


def _check_backbone(backbone: nn.Module) -> None:
    needed = ('embed_dims', 'num_layers', 'patch_size', 'embed', 'run_block')
    missing = [name for name in needed if not hasattr(backbone, name)]
    if missing:
        raise OptionTypeError(
            f'ViTAdapter cannot wrap {type(backbone).__name__}, which lacks {", ".join(missing)}: '
            "give a plain backbone such as mmvttt.Vittt, or for timm's ViT mmvttt.TimmViT(vit)"
        )
    if backbone.patch_size != _PATCH:
        raise OptionError(
            f'ViTAdapter needs a backbone with patch_size {_PATCH} (its maps have strides '
            f'{_STRIDES}); {type(backbone).__name__} has {backbone.patch_size}'
        )


def _groups(indexes: Sequence[Sequence[int]] | None, num_layers: int) -> list[tuple[int, int]]:
    """The first and last block of every interaction, checked to run every block once, in order."""
    if indexes is None:
        count = min(_NUM_GROUPS, num_layers)
        bounds = [num_layers * i // count for i in range(count + 1)]
        indexes = [(start, end - 1) for start, end in pairwise(bounds)]
    if isinstance(indexes, str) or not isinstance(indexes, Sequence):
        raise OptionTypeError(
            f'interaction_indexes={indexes!r}: give a list of groups [first, last].'
        )
    for group in indexes:
        check_ints('a group of interaction_indexes', group, 0, num_layers - 1)
    groups: list[Any] = [tuple(group) for group in indexes]
    run = [i for group in groups if len(group) == 2 for i in range(group[0], group[1] + 1)]
    if run != list(range(num_layers)) or any(len(group) != 2 for group in groups):
        raise OptionError(
            f'interaction_indexes is {[list(group) for group in groups]}; the groups [first, last] '
            f"must run the backbone's blocks 0 to {num_layers - 1} once each, in order, as in "
            f'{[[0, num_layers - 1]]}'
        )
    return groups
