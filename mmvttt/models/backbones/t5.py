"""T⁵, a pretrained ViT whose attention is replaced by Test-Time Training (t5 Sec. 4 and 5.1)."""

from collections.abc import Mapping
from typing import Any

from ..layers.mixer import Mixer
from ..linearize import RECIPES
from .vit3 import ViT3

# Parts of a mixer that a ViT also has.
_INHERITED = ('.mixer.qkv.', '.mixer.proj.')


class T5(ViT3):
    """T⁵-T/S/B: DeiT's body without class token, at linear cost, which inherits a ViT's weights.

    `mmvttt.models.inherit.inherit_vit` initialises it from a ViT or DeiT of timm or
    mmpretrain, and so does `init_cfg=dict(type='mmvttt.InheritViT', checkpoint=…)` in a config. The
    paper has tiny and small, and base is DeiT-B with the same mixer.

    Args:
        arch: See `ViT3`. It must have as many heads as the source, which the shapes of the
            weights do not show.
        mixer: Options of `TTTMixer` that override T⁵'s: `inner` (Tab. 1), `key_norm` (Tab. 2),
            `locality` and `neighborhood` (Tab. 3, where T⁵⁺ is `dict(neighborhood=5)`), or
            `dict(type=…)` of another mixer, without the options of T⁵.
        cpe, pos_embed: See `ViT3`. The former is "+ CPE(x)" of Tab. 3.
        only_new: Train only parameters that a ViT does not have (the "freeze" of Tab. 1). A
            classifier's head is not part of this backbone. A learning rate of 0 freezes it, see
            `new_parameters`.
        options: Options of `ViT3`: `drop_path_rate`, `img_size`, `out_indices`, …

    Raises:
        ValueError: If an option is out of range.
    """

    default_mixer: Mapping[str, Any] = dict(type='mmvttt.TTTMixer', **RECIPES['t5'].options)
    arch_zoo: Mapping[str, Mapping[str, int]] = {
        **ViT3.arch_zoo,
        'tiny': dict(embed_dims=192, num_layers=12, num_heads=3, feedforward_channels=768),
    }

    def __init__(
        self,
        arch: str | Mapping[str, int] = 'small',
        mixer: Mixer | None = None,
        cpe: bool = False,
        pos_embed: bool = True,
        only_new: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(arch, mixer, cpe, pos_embed, **options)
        if only_new:
            new = self.new_parameters()
            for name, parameter in self.named_parameters():
                if name not in new:
                    parameter.requires_grad_(False)

    def new_parameters(self) -> set[str]:
        """Names of parameters that a ViT lacks: inner models, convolutions, projections of q and k.

        `paramwise_cfg=dict(new_lr_mult=20)` of `LayerDecayOptimWrapperConstructor` reads it.
        """
        return {
            name
            for name, _ in self.named_parameters()
            if ('.mixer.' in name or '.cpe.' in name)
            and not any(part in name for part in _INHERITED)
        }
