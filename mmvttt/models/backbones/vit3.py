"""ViT³, the plain Vision Test-Time Training backbone (vit3 Sec. 5 and 9, Tab. 11)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from ..layers.mixer import Mixer, resolve_mixer
from ..layers.mixer_block import MixerBlock
from .base import PlainBackbone, drop_path_rates, resolve_arch


class ViT3(PlainBackbone):
    """ViT³-T/S/B: a ViT without position embedding and class token, with TTT instead of attention.

    Args:
        arch: 'tiny', 'small', 'base', or a dict with `embed_dims`, `num_layers`, `num_heads` and
            `feedforward_channels`.
        mixer: Options of the `default_mixer`, `ViT3Mixer` (`scale`, `backend`), or another token
            mixer as a class, a name, or `dict(type=…)` with options: `dict(type='mmvttt.TTTMixer',
            …)` is any other point of the design space.
        cpe: Whether every block begins with a conditional position encoding, `x + DWConv3×3(x)`.
        pos_embed: Whether to learn a position embedding for the grid of `img_size`.
        drop_path_rate: Stochastic depth of the last block, rising linearly from 0 at the first.
        options: Options of `PlainBackbone`: `img_size`, `out_indices`, …

    Raises:
        ValueError: If an option is out of range.
    """

    # Options of PlainBackbone that come from the arch.
    derived_options: ClassVar = ('embed_dims', 'num_layers', 'patch_embed', 'norm')
    default_mixer: Mapping[str, Any] = dict(type='mmvttt.ViT3Mixer')
    arch_zoo: Mapping[str, Mapping[str, int]] = {
        'tiny': dict(embed_dims=192, num_layers=12, num_heads=6, feedforward_channels=768),
        'small': dict(embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1536),
        'base': dict(embed_dims=768, num_layers=12, num_heads=12, feedforward_channels=3072),
    }

    def __init__(
        self,
        arch: str | Mapping[str, int] = 'small',
        mixer: Mixer | None = None,
        cpe: bool = True,
        pos_embed: bool = False,
        drop_path_rate: float = 0.0,
        **options: Any,
    ) -> None:
        arch = resolve_arch(arch, self.arch_zoo, type(self).__name__)
        mixer = resolve_mixer(mixer, self.default_mixer)
        super().__init__(
            arch['embed_dims'],
            arch['num_layers'],
            pos_embed=pos_embed,
            **options,
        )
        self.blocks = nn.ModuleList(
            MixerBlock(
                self.embed_dims,
                arch['num_heads'],
                arch['feedforward_channels'],
                mixer=mixer,
                cpe=cpe,
                drop_path=rate,
            )
            for rate in drop_path_rates(drop_path_rate, self.num_layers)
        )
        self.train(self.training)
