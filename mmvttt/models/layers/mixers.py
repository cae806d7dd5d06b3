"""The library's token mixers by name."""

from torch import nn

from .ttt_linear_mixer import TTTLinearMixer
from .ttt_mixer import TTTMixer
from .vit3_mixer import ViT3Mixer

MIXERS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (TTTLinearMixer, TTTMixer, ViT3Mixer)
}
