"""BatchNorm statistics of rank 0 on every rank, as the authors of H-ViT³ train on ImageNet."""

from typing import Any

from mmengine.hooks import Hook
from torch.nn.parallel import DistributedDataParallel

from ...registry import HOOKS


@HOOKS.register_module()
class BroadcastBuffersHook(Hook):
    """Has DDP send the buffers of rank 0 to all ranks before each step.

    A hook, so that a recipe says it whatever wrapper a user's config chooses
    (`configs/_base_/ddp.py`). Without DDP it does nothing.
    """

    def before_train(self, runner: Any) -> None:
        """Switches it on: mmengine's wrapper leaves each rank its own statistics."""
        if isinstance(runner.model, DistributedDataParallel):
            runner.model.broadcast_buffers = True
