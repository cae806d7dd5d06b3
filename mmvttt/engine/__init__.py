"""What trains a model: layer decay, MESA's schedule, the check for data, the runs behind tools/."""

from .annotation_check import check_annotations
from .anomaly import AnomalyError, AnomalyHook
from .checkpoint_hook import CheckpointHook, Preempted
from .data_check import DataError, MissingDataError, check_data
from .exact import ExactBatchSampler, ExactEpochLoop, ExactIterLoop, SeededDataset, make_exact
from .fsdp import BlockFSDPStrategy, wrap_blocks
from .layer_decay import LayerDecayOptimWrapperConstructor
from .mesa import MESAHook
from .resume import ResumeError, latest_checkpoint, settle_resume
from .topology import TopologyHook

__all__ = [
    'AnomalyError',
    'AnomalyHook',
    'BlockFSDPStrategy',
    'CheckpointHook',
    'DataError',
    'ExactBatchSampler',
    'ExactEpochLoop',
    'ExactIterLoop',
    'LayerDecayOptimWrapperConstructor',
    'MESAHook',
    'MissingDataError',
    'Preempted',
    'ResumeError',
    'SeededDataset',
    'TopologyHook',
    'check_annotations',
    'check_data',
    'latest_checkpoint',
    'make_exact',
    'settle_resume',
    'wrap_blocks',
]
