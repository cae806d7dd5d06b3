"""TTT in the place of the attention of somebody else's transformer."""

from .linearize import RECIPES, Linearization, linearize
from .replacement import MapSize, Replacement

__all__ = [
    'RECIPES',
    'Linearization',
    'MapSize',
    'Replacement',
    'linearize',
]
