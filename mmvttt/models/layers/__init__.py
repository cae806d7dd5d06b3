"""Token mixers, convolutions over tokens, position encodings: the parts of the backbones."""

from typing import TYPE_CHECKING, Any

from mmvttt.on_demand import OnDemand

if TYPE_CHECKING:
    from .inner_models import InnerModel
    from .ttt_linear_mixer import TTTLinearMixer
    from .ttt_mixer import InnerTraining, TTTMixer
    from .vit3_mixer import ViT3Mixer

__all__ = ['InnerModel', 'InnerTraining', 'TTTLinearMixer', 'TTTMixer', 'ViT3Mixer']
_NAMES = OnDemand(
    __name__,
    inner_models='InnerModel',
    ttt_linear_mixer='TTTLinearMixer',
    ttt_mixer='InnerTraining TTTMixer',
    vit3_mixer='ViT3Mixer',
)


def __getattr__(name: str) -> Any:
    return _NAMES.attribute(name)
