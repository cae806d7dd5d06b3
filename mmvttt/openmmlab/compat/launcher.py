"""Training without a GPU: gloo for launcher 'pytorch', DDP and FSDP without devices, bf16."""

from __future__ import annotations

import atexit
import logging
import sys
from functools import partial, wraps
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.dist import utils as dist_utils
from torch import nn

from .patch import replace


def _no_gpu() -> bool:
    # mmengine's other accelerators (NPU, MLU, MUSA) have their own branches.
    return get_device() in ('cpu', 'mps')


def _on_cpu(module: nn.Module) -> bool:
    return all(p.device.type == 'cpu' for p in module.parameters())


def _without_sync_bn(module: nn.Module) -> nn.Module:
    if not any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        return module
    from mmengine.logging import print_log
    from mmengine.model import revert_sync_batchnorm

    # torch has no SyncBN on the CPU; a warning, because the statistics change.
    print_log('SyncBN needs a GPU: every process normalises on its own', 'current', logging.WARNING)
    return revert_sync_batchnorm(module)


def _leave() -> None:
    # Otherwise nothing destroys the group. A gloo thread needs the GIL to release its last tensor;
    # at Python's exit that aborts a successful run (one in twenty, on four processes). After an
    # error the other processes may wait for this one, which would wait for them here.
    if torch.distributed.is_initialized() and not hasattr(sys, 'last_value'):
        torch.distributed.destroy_process_group()


def launch_with_gloo() -> str | None:
    """Makes `init_dist('pytorch')` use gloo without an accelerator."""
    original = dist_utils._init_dist_pytorch
    if not _no_gpu():
        return 'there is a GPU'

    @wraps(original)
    def init(backend: str, init_backend: str = 'torch', **kwargs: Any) -> None:
        torch.distributed.init_process_group('gloo', **kwargs)
        atexit.register(_leave)

    replace(dist_utils, '_init_dist_pytorch', init)
    return None


def wrap_without_devices() -> str | None:
    """Drops `device_ids` of MMDistributedDataParallel, and SyncBN, for modules on the CPU."""
    from mmengine.model.wrappers.distributed import MMDistributedDataParallel

    original = MMDistributedDataParallel.__init__

    @wraps(original)
    def init(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _on_cpu(module):
            kwargs.update(device_ids=None, output_device=None)
            module = _without_sync_bn(module)
        original(self, module, *args, **kwargs)

    replace(MMDistributedDataParallel, '__init__', init)
    return None


def shard_without_devices() -> str | None:
    """Makes MMFullyShardedDataParallel stay on the CPU, without SyncBN, if there is no GPU."""
    from mmengine.model.wrappers.fully_sharded_distributed import MMFullyShardedDataParallel

    original = MMFullyShardedDataParallel.__init__
    if not _no_gpu():
        return 'there is a GPU'

    @wraps(original)
    def init(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # The blocks inside are wrapped by the same class, with the root's arguments.
        kwargs.update(device_id=torch.device('cpu'))
        original(self, _without_sync_bn(module), *args, **kwargs)

    replace(MMFullyShardedDataParallel, '__init__', init)
    return None


def autocast_on_cpu() -> str | None:
    """Lets AmpOptimWrapper be built without a GPU. mmengine's autocast does bf16 there."""
    from mmengine.optim.optimizer import amp_optimizer_wrapper as amp

    if not _no_gpu():
        return 'there is a GPU'
    # Changes only this module's view of the machine: its assertion, and its loss scaler's device.
    replace(amp, 'is_cuda_available', lambda: True)
    replace(amp, 'GradScaler', partial(torch.amp.GradScaler, 'cpu'))
    return None
