"""Token mixers, convolutions over tokens, position encodings: the parts of the backbones."""

from .conv import CausalConv1d, DWConv2d, to_map
from .drop_path import DropPath
from .embedding import PatchConv2d, PatchEmbed, resize_positions
from .inner_models import InnerModel
from .inner_options import InnerOptions
from .mixer import Mixer, TokenBlock, build_mixer, resolve_mixer
from .mixer_block import FeedForward, MixerBlock
from .mixers import MIXERS
from .neighborhood import neighborhood_attention
from .norms import ConvNormAct, NormLayer, build_norm
from .rope import rotate, rotation_2d
from .ttt_linear_mixer import TTTLinearMixer
from .ttt_mixer import InnerTraining, TTTMixer
from .vit3_mixer import ViT3Mixer

__all__ = [
    'MIXERS',
    'CausalConv1d',
    'ConvNormAct',
    'DWConv2d',
    'DropPath',
    'FeedForward',
    'InnerModel',
    'InnerOptions',
    'InnerTraining',
    'Mixer',
    'MixerBlock',
    'NormLayer',
    'PatchConv2d',
    'PatchEmbed',
    'TTTLinearMixer',
    'TTTMixer',
    'TokenBlock',
    'ViT3Mixer',
    'build_mixer',
    'build_norm',
    'neighborhood_attention',
    'resize_positions',
    'resolve_mixer',
    'rotate',
    'rotation_2d',
    'to_map',
]
