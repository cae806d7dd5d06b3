"""TTT in the place of attention, in transformers of other packages."""

from . import folder  # noqa: F401 - registers linear_vit with timm
from .account import Linearization
from .linearize import RECIPES, linearize
from .replacement import MapSize, Replacement

__all__ = ['RECIPES', 'Linearization', 'MapSize', 'Replacement', 'linearize']
