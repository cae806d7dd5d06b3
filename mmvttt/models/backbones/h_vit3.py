"""H-ViT³, the four-stage Vision Test-Time Training backbone (vit3 Sec. 5 and 9, Tab. 12)."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from mmvttt.arguments import check_choice, check_int
from mmvttt.errors import OptionError

from ..layers.conv import map_size, to_map
from ..layers.embedding import pad_to_multiple
from ..layers.mixer import Mixer, resolve_mixer
from ..layers.mixer_block import MixerBlock
from ..layers.norms import ConvNormAct, NormLayer, build_norm
from ..layers.rope import rotation_2d
from .base import (
    OUT_TYPES,
    check_image,
    drop_path_rates,
    resolve_arch,
    resolve_indices,
    run,
)

_MLP_RATIO = 4
_NORM_EPS = 1e-5


class Stem(nn.Sequential):
    """Five convolutions from an image to a map at stride 4, padded to whole cells.

    Args:
        in_channels: Channels of the image.
        embed_dims: Channels C of the map.
        norm_layer: Norm after each convolution.
    """

    def __init__(self, in_channels: int, embed_dims: int, norm_layer: NormLayer) -> None:
        half, wide = embed_dims // 2, 4 * embed_dims
        super().__init__(
            ConvNormAct(in_channels, half, 3, stride=2, norm_layer=norm_layer),
            ConvNormAct(half, half, 3, norm_layer=norm_layer),
            ConvNormAct(half, half, 3, norm_layer=norm_layer),
            ConvNormAct(half, wide, 3, stride=2, norm_layer=norm_layer),
            ConvNormAct(wide, embed_dims, 1, norm_layer=norm_layer, act=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(B, in_channels, H, W)` → `(B, C, ⌈H/4⌉, ⌈W/4⌉)`, channels last."""
        # vmap knows no memory formats.
        x = pad_to_multiple(x, 4).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return super().forward(x)


class Downsample(nn.Module):
    """Expands the channels, halves the sides by a depth-wise convolution, and projects.

    Args:
        in_channels: Channels of the stage before.
        out_channels: Channels C of the stage after. The convolution between them has 4 C.
        norm_layer: Norm after the last convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, norm_layer: NormLayer) -> None:
        super().__init__()
        wide = 4 * out_channels
        self.widen = nn.Conv2d(in_channels, wide, 1)
        self.halve = nn.Conv2d(wide, wide, 3, stride=2, padding=1, groups=wide)
        self.narrow = nn.Conv2d(wide, out_channels, 1)
        self.norm = build_norm(norm_layer, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, C', h, w)` → `(B, C, ⌈h/2⌉, ⌈w/2⌉)`, with odd sides padded at the end."""
        # In place: the expanded map is the largest tensor of the model.
        x = self.widen(pad_to_multiple(x, 2)).relu_()
        return self.norm(self.narrow(self.halve(x).relu_()))


class Stage(nn.Module):
    """A downsampling (except in the first stage) and the blocks of one resolution.

    Args:
        embed_dims: Channels C.
        num_heads: Heads of the mixers.
        mixer: Config of the mixers, which get the `rotation` (see `ViT3Mixer`) if they declare it
            in `extras`.
        drop_path_rates: Stochastic depth of every block.
        downsample: The module in front of the blocks.
        with_cp: See `PlainBackbone`.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        mixer: Mapping,
        drop_path_rates: Sequence[float],
        downsample: Downsample | None,
        with_cp: bool,
    ) -> None:
        super().__init__()
        self.embed_dims = embed_dims
        self.with_cp = with_cp
        self.downsample = downsample
        self.blocks = nn.ModuleList(
            MixerBlock(
                embed_dims,
                num_heads,
                _MLP_RATIO * embed_dims,
                mixer=mixer,
                dwconv=True,
                drop_path=rate,
                norm_eps=_NORM_EPS,
                extras=('rotation',),
            )
            for rate in drop_path_rates
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map of the stage before (or of the stem) → map `(B, C, h, w)`, channels last."""
        if self.downsample is not None:
            x = self.downsample(x)
        hw = map_size(x)
        exact = torch.promote_types(x.dtype, torch.float32)
        rotation = rotation_2d(hw, self.embed_dims, device=x.device, dtype=exact)
        # Sums take the layout of their first operand: a contiguous one spreads through the blocks.
        x = x.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
        for block in self.blocks:
            x = run(block, self.with_cp, x, hw, rotation=rotation)
        return to_map(x, hw)


class HViT3(nn.Module):
    """H-ViT³-T/S/B: four stages at strides 4, 8, 16 and 32, linear in the number of pixels.

    An image of any size is padded at the right and the bottom to multiples of 4, and so is a map
    of odd sides before it is halved: stage s has ⌈H / s⌉ × ⌈W / s⌉ cells. The rotary positions are
    computed for the image's size.

    Args:
        arch: 'tiny', 'small', 'base', or a dict with `embed_dims`, `depths` and `num_heads`, a
            number for each stage.
        out_type: 'featmap' returns maps `(B, C_i, h_i, w_i)`, with a LayerNorm each, for detection
            and segmentation. 'avg_featmap' returns the mean `(B, C)` of the last one after a
            BatchNorm, for a classification head.
        out_indices: Stages whose maps are returned. By default these are all stages, or the last
            one if it is pooled. Stages behind the last of them do not run, see `PlainBackbone`.
        drop_path_rate: Stochastic depth of the last block, rising linearly from 0 at the first.
        norm_layer: Norms of the stem and of the downsampling, and of the pooled output, see
            `build_norm`. For detection with few images per GPU use 'SyncBN', or 'BN' in frozen
            stages, or `dict(type='GN', num_groups=32)`.
        in_channels: Channels of the image.
        frozen_stages: −1 trains everything, 0 freezes the stem, n the stem and the first n stages
            with the norms of their outputs.
        with_cp: See `PlainBackbone`.
        mixer: Options of `ViT3Mixer` (`scale`, `backend`), or another mixer as a class, a name or
            `dict(type=…)`, which gets the `rotation` of the map if its `extras` name it.

    Raises:
        ValueError: If an option is out of range.
    """

    arch_zoo: Mapping[str, Mapping[str, Sequence[int]]] = {
        'tiny': dict(embed_dims=(64, 128, 320, 512), depths=(1, 3, 9, 4), num_heads=(2, 4, 10, 16)),
        'small': dict(
            embed_dims=(64, 128, 320, 512), depths=(2, 6, 18, 8), num_heads=(2, 4, 10, 16)
        ),
        'base': dict(
            embed_dims=(96, 192, 448, 640), depths=(2, 6, 18, 8), num_heads=(3, 6, 14, 20)
        ),
    }

    def __init__(
        self,
        arch: str | Mapping[str, Sequence[int]] = 'tiny',
        out_type: str = 'featmap',
        out_indices: int | Sequence[int] | None = None,
        drop_path_rate: float = 0.0,
        norm_layer: NormLayer = 'BN',
        in_channels: int = 3,
        frozen_stages: int = -1,
        with_cp: bool = False,
        mixer: Mixer | None = None,
    ) -> None:
        super().__init__()
        sizes = resolve_arch(arch, self.arch_zoo, type(self).__name__)
        dims, depths, heads = (tuple(sizes[k]) for k in ('embed_dims', 'depths', 'num_heads'))
        last = len(dims) - 1
        if not len(dims) == len(depths) == len(heads) > 0:
            raise OptionError(f'The arch needs one number for each stage in every entry: {sizes}.')
        if any(channels % 4 for channels in dims):
            raise OptionError(f'embed_dims={dims}: the rotary positions need multiples of 4.')
        check_choice('out_type', out_type, OUT_TYPES)
        check_int('in_channels', in_channels)
        check_int('frozen_stages', frozen_stages, -1, last + 1)
        mixer = resolve_mixer(mixer, dict(type='mmvttt.ViT3Mixer'))
        if out_indices is None:
            out_indices = last if out_type == 'avg_featmap' else range(last + 1)
        self.out_indices = resolve_indices(out_indices, last + 1)
        if out_type == 'avg_featmap' and self.out_indices != (last,):
            raise OptionError(
                f"out_type='avg_featmap' returns the mean of the last stage, {last}, not of "
                f"{self.out_indices}: leave out_indices out, or choose out_type='featmap'."
            )
        self.embed_dims = dims
        self.depths = depths
        self.in_channels = in_channels
        self.out_type = out_type
        self.frozen_stages = frozen_stages

        rates = drop_path_rates(drop_path_rate, sum(depths))
        self.stem = Stem(in_channels, dims[0], norm_layer)
        self.stages = nn.ModuleList(
            Stage(
                dims[s],
                heads[s],
                mixer,
                rates[end - depths[s] : end],
                Downsample(dims[s - 1], dims[s], norm_layer) if s else None,
                with_cp,
            )
            for s, end in enumerate(accumulate(depths))
        )
        first = self.stages[0].get_submodule('blocks.0.mixer')
        if not hasattr(first, 'extras'):
            warnings.warn(
                f'{type(first).__name__} declares no extras, so H-ViT³ does not pass it the '
                "rotation, the positions of its tokens: write extras = ('rotation',) and take it "
                'in forward, or extras = () where it needs none.',
                stacklevel=2,
            )
        if out_type == 'avg_featmap':
            self.norm = build_norm(norm_layer, dims[-1])
        else:
            self.norms = nn.ModuleDict(
                {str(i): nn.LayerNorm(dims[i], eps=_NORM_EPS) for i in self.out_indices}
            )
        self.train(self.training)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Image `(B, in_channels, H, W)` → one output for each of `out_indices`.

        Maps `(B, C_i, ⌈H/s⌉, ⌈W/s⌉)`, s = 4, 8, 16, 32, or with `out_type='avg_featmap'` a feature
        `(B, C)`.
        """
        outs = []
        for i, y in enumerate(self.maps(x, max(self.out_indices) + 1)):
            if i in self.out_indices:
                if self.out_type == 'avg_featmap':
                    outs.append(self.norm(y).mean((2, 3)))
                else:
                    normed = self.norms[str(i)](y.permute(0, 2, 3, 1))
                    outs.append(normed.permute(0, 3, 1, 2))
        return tuple(outs)

    def maps(self, x: Tensor, count: int) -> Iterator[Tensor]:
        """Image `(B, in_channels, H, W)` → the maps of the first `count` stages, not normed."""
        check_image(x, self.in_channels, type(self).__name__)
        x = self.stem(x)
        for stage in self.stages[:count]:
            x = stage(x)
            yield x

    def train(self, mode: bool = True) -> 'HViT3':
        """Sets the mode, but keeps frozen parts in evaluation mode and without gradients."""
        super().train(mode)
        if self.frozen_stages >= 0:
            frozen = [self.stem, *self.stages[: self.frozen_stages]]
            if self.out_type == 'featmap':
                frozen += [m for i, m in self.norms.items() if int(i) < self.frozen_stages]
            elif self.frozen_stages == len(self.stages):
                frozen.append(self.norm)
            for module in frozen:
                module.eval().requires_grad_(False)
        return self

    def optional_parameters(self) -> set[str]:
        """Names of the parameters that the weights of a classifier lack: norms of the outputs."""
        return {name for name, _ in self.named_parameters() if name.startswith('norms.')}

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Layer of a parameter, and number of layers, as `PlainBackbone.get_layer_depth`.

        0 is the stem. Each block is a layer, together with a downsampling in front of it. The norms
        of the outputs and everything outside the backbone are in the last layer.
        """
        total = sum(self.depths) + 2
        if not param_name.startswith(prefix):
            return total - 1, total
        head, *rest = param_name[len(prefix) :].split('.')
        if head == 'stem':
            return 0, total
        if head != 'stages':
            return total - 1, total
        stage, kind, index = int(rest[0]), rest[1], rest[2]
        return 1 + sum(self.depths[:stage]) + (int(index) if kind == 'blocks' else 0), total
