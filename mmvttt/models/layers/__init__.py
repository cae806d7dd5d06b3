"""Token mixers, convolutions over tokens, position encodings: the parts of the backbones."""

from .conv import CausalConv1d, DWConv2d
from .rope import rotate, rotation_2d
from .ttt_linear_mixer import TTTLinearMixer
from .ttt_mixer import TTTMixer
from .vit3_block import FeedForward, ViT3Block
from .vit3_mixer import ViT3Mixer

__all__ = [
    'CausalConv1d',
    'DWConv2d',
    'FeedForward',
    'TTTLinearMixer',
    'TTTMixer',
    'ViT3Block',
    'ViT3Mixer',
    'rotate',
    'rotation_2d',
]
