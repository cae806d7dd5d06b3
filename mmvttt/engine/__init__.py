"""What trains a model: layer decay, MESA's schedule, the check for data, the runs behind tools/."""

from .data_check import MissingDataError, check_data
from .layer_decay import LayerDecayOptimWrapperConstructor
from .mesa import MESAHook

__all__ = [
    'LayerDecayOptimWrapperConstructor',
    'MESAHook',
    'MissingDataError',
    'check_data',
]
