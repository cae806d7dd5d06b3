# The noisy training as a pure-Python config, whose types are classes.
from mmengine.config import read_base
from mmengine.hooks import CheckpointHook
from mmengine.optim import OptimWrapper
from mmengine.runner import EpochBasedTrainLoop
from noisy import NoisyModel
from torch.optim import AdamW

with read_base():
    from .noisy_config import *  # noqa: F403

default_scope = None
model = dict(type=NoisyModel)
train_cfg = dict(type=EpochBasedTrainLoop, max_epochs=3, val_interval=1)
optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=AdamW, lr=0.01))
default_hooks = dict(checkpoint=dict(type=CheckpointHook, interval=1))
