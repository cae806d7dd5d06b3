"""ViT³, the plain Vision Test-Time Training backbone (vit3 Sec. 5 and 9, Tab. 11)."""

from collections.abc import Mapping
from typing import Any

from mmvttt.registry import MODELS

from .mixer_backbone import MixerBackbone


@MODELS.register_module()
class ViT3(MixerBackbone):
    """ViT³-T/S/B: a ViT without position embedding and class token, its attention trained by TTT.

    Args:
        arch: 'tiny', 'small', 'base', or a dict with `embed_dims`, `num_layers`, `num_heads` and
            `feedforward_channels`.
        mixer: Config of the token mixer. Without a type it has options of `ViT3Mixer` (`scale`,
            `backend`); `dict(type='mmvttt.TTTMixer', …)` is any other point of the design space.
        cpe: Whether every block begins with a conditional position encoding.
        pos_embed: Whether to learn a position embedding for the grid of `img_size` (ViT³: no).
        options: Those of `MixerBackbone`: `drop_path_rate`, `img_size`, `out_indices`, …

    Raises:
        ValueError: If an option is not one of those named here.
    """

    default_mixer: Mapping[str, Any] = dict(type='mmvttt.ViT3Mixer')
    arch_zoo: Mapping[str, Mapping[str, int]] = {
        'tiny': dict(embed_dims=192, num_layers=12, num_heads=6, feedforward_channels=768),
        'small': dict(embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1536),
        'base': dict(embed_dims=768, num_layers=12, num_heads=12, feedforward_channels=3072),
    }

    def __init__(
        self,
        arch: str | Mapping[str, int] = 'small',
        mixer: Mapping | None = None,
        cpe: bool = True,
        pos_embed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(arch, mixer, cpe, pos_embed=pos_embed, **options)
