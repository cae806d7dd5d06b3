"""Token mixers, convolutions over tokens, position encodings: the parts of the backbones."""

from typing import TYPE_CHECKING, Any

from mmvttt.on_demand import OnDemand

if TYPE_CHECKING:
    from .inner_models import InnerModel
    from .inner_options import InnerOptions
    from .mixer import build_mixer, resolve_mixer
    from .ttt_linear_mixer import TTTLinearMixer
    from .ttt_mixer import InnerTraining, TTTMixer
    from .vit3_mixer import ViT3Mixer

__all__ = [
    'InnerModel',
    'InnerOptions',
    'InnerTraining',
    'TTTLinearMixer',
    'TTTMixer',
    'ViT3Mixer',
    'build_mixer',
    'resolve_mixer',
]
_NAMES = OnDemand(
    __name__,
    inner_models='InnerModel',
    inner_options='InnerOptions',
    mixer='build_mixer resolve_mixer',
    ttt_linear_mixer='TTTLinearMixer',
    ttt_mixer='InnerTraining TTTMixer',
    vit3_mixer='ViT3Mixer',
)


def __getattr__(name: str) -> Any:
    return _NAMES.attribute(name)
