"""Token mixers, convolutions over tokens, position encodings: the parts of the backbones."""

from .conv import CausalConv1d, DWConv2d, to_map
from .drop_path import DropPath
from .inner_models import InnerModel
from .mixer import TokenBlock, build_mixer, resolve_mixer
from .mixer_block import FeedForward, MixerBlock
from .neighborhood import neighborhood_attention
from .rope import rotate, rotation_2d
from .ttt_linear_mixer import TTTLinearMixer
from .ttt_mixer import InnerTraining, TTTMixer
from .vit3_mixer import ViT3Mixer

__all__ = [
    'CausalConv1d',
    'DWConv2d',
    'DropPath',
    'FeedForward',
    'InnerModel',
    'InnerTraining',
    'MixerBlock',
    'TTTLinearMixer',
    'TTTMixer',
    'TokenBlock',
    'ViT3Mixer',
    'build_mixer',
    'neighborhood_attention',
    'resolve_mixer',
    'rotate',
    'rotation_2d',
    'to_map',
]
