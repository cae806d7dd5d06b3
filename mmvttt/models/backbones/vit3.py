"""ViT³, the plain Vision Test-Time Training backbone (vit3 Sec. 5 and 9, Tab. 11)."""

from collections.abc import Mapping
from typing import Any

from .mixer_backbone import MixerBackbone


class ViT3(MixerBackbone):
    """ViT³-T/S/B: a ViT without position embedding and class token, with TTT instead of attention.

    Takes the arguments of `MixerBackbone`. Without a type, `mixer` holds options of `ViT3Mixer`
    (`scale`, `backend`). `dict(type='mmvttt.TTTMixer', …)` is any other point of the design space.
    """

    default_mixer: Mapping[str, Any] = dict(type='mmvttt.ViT3Mixer')
    arch_zoo: Mapping[str, Mapping[str, int]] = {
        'tiny': dict(embed_dims=192, num_layers=12, num_heads=6, feedforward_channels=768),
        'small': dict(embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1536),
        'base': dict(embed_dims=768, num_layers=12, num_heads=12, feedforward_channels=3072),
    }
