"""What trains a model: layer decay, checkpoints, the check for data, the runs behind tools/."""

from .checkpoint import CheckpointError, CheckpointMismatchError, LoadReport, load_pretrained
from .data_check import MissingDataError, check_data
from .layer_decay import LayerDecayOptimWrapperConstructor
from .mesa import MESAHook

__all__ = [
    'CheckpointError',
    'CheckpointMismatchError',
    'LayerDecayOptimWrapperConstructor',
    'LoadReport',
    'MESAHook',
    'MissingDataError',
    'check_data',
    'load_pretrained',
]
