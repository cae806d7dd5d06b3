"""TTT in the place of attention, in transformers of other packages."""

from . import folder  # noqa: F401 - registers linear_vit with timm
from .linearize import RECIPES, Linearization, linearize
from .replacement import MapSize, Replacement

__all__ = ['RECIPES', 'Linearization', 'MapSize', 'Replacement', 'linearize']
