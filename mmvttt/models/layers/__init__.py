"""Token mixers, convolutions over tokens, position encodings: the parts of the backbones."""

from .conv import CausalConv1d, DWConv2d, to_map
from .drop_path import DropPath
from .key_norms import normalize_keys
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
    'InnerTraining',
    'MixerBlock',
    'TTTLinearMixer',
    'TTTMixer',
    'ViT3Mixer',
    'neighborhood_attention',
    'normalize_keys',
    'rotate',
    'rotation_2d',
    'to_map',
]
