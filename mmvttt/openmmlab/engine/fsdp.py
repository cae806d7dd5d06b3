"""FSDP by blocks: the wrapping policy, and a strategy with the steps of an unsharded training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine._strategy.fsdp import FSDP, FSDPStrategy
from mmengine.device import get_device
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from mmvttt.deploy.compile import block_classes
from mmvttt.errors import OptionError

from ..registry import FUNCTIONS, STRATEGIES

# Parts of an optimizer's state that are FSDP's; the rest is the optimizer wrapper's.
_SHARDED = ('state', 'param_groups')


@FUNCTIONS.register_module()
def wrap_blocks(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    blocks: Sequence[str] | None = None,
) -> bool:
    """FSDP's wrapping policy: each block of a backbone is a unit, gathered only for its own step.

    Args:
        module: The module in question.
        recurse: Whether FSDP asks to recurse into it, or to make it a unit.
        nonwrapped_numel: Number of its parameters outside units.
        blocks: Names of the classes of blocks, see `compile_blocks`.
    """
    return recurse or (nonwrapped_numel > 0 and isinstance(module, block_classes(blocks)))


@STRATEGIES.register_module()
class BlockFSDPStrategy(FSDPStrategy):
    """mmengine's `FSDPStrategy`, with the steps and the checkpoints of an unsharded training.

    - The optimizer's groups are formed before sharding: a shard is flat and may be empty, so by the
      rule for 1-D parameters nothing would decay.
    - Gradients are clipped by the norm over all ranks (mmengine: over its own shards).
    - A checkpoint has the optimizer wrapper's state (base rate, loss scale), and is read to host
      memory: a GPU that needs shards has no room for it.

    Args:
        kwargs: Arguments of mmengine's strategy.

    Raises:
        ValueError: No process group exists, FSDP replaces the parameters, or a checkpoint has
            another optimizer.
    """

    def __init__(self, *, state_dict_cfg: str | dict = 'full', **kwargs: Any) -> None:
        super().__init__(state_dict_cfg=state_dict_cfg, **kwargs)
        self._optim_cfg: Any = None
        self._built: OptimWrapper | None = None
        if get_device() == 'cpu':
            # torch offloads by `.cpu()`, which does not copy here: it would save the buffer in
            # which it gathers the optimizer's states one after the other, and (2.11) free the
            # parameters.
            self.state_dict_config.offload_to_cpu = False
            self.optim_state_dict_config.offload_to_cpu = False

    def prepare(self, model: nn.Module | dict, *, optim_wrapper: Any = None, **kwargs: Any) -> Any:
        """Builds and shards the model and builds its optimizer, as in mmengine."""
        if not self.distributed:
            raise OptionError(
                'FSDP shares a model out among processes, and there is one without a launcher: '
                'start with tools/dist_train.sh CONFIG GPUS, or leave FSDP out with --cfg-options '
                'runner_type=Runner'
            )
        self._optim_cfg = optim_wrapper
        return super().prepare(model, optim_wrapper=optim_wrapper, **kwargs)

    def build_optim_wrapper(self, optim_wrapper: Any, model: nn.Module | None = None) -> Any:
        """The wrapper that was built before sharding."""
        if self._built is not None:
            return self._built
        return super().build_optim_wrapper(optim_wrapper, model)

    def optim_state_dict(self) -> dict:
        """The whole optimizer's state (rank 0), by the names of parameters, and its wrapper's."""
        wrapper = self.optim_wrapper
        state = FSDP.optim_state_dict(self.model, wrapper.optimizer)
        return {**{k: v for k, v in wrapper.state_dict().items() if k not in _SHARDED}, **state}

    def load_optim_state_dict(self, state_dict: dict) -> None:
        """Loads this rank's part of the whole state of a sharded training."""
        if any(isinstance(p, int) for g in state_dict['param_groups'] for p in g['params']):
            raise OptionError(
                'the checkpoint is of a training without FSDP: resume without FSDP, or take its '
                'weights alone by load_from'
            )
        # mmengine passes these by position, in an order that torch changed.
        part = FSDP.optim_state_dict_to_load(
            model=self.model,
            optim=self.optim_wrapper.optimizer,
            optim_state_dict={k: state_dict[k] for k in _SHARDED},
        )
        self.optim_wrapper.load_state_dict({**state_dict, **part})

    def load_checkpoint(self, filename: str, *, map_location: Any = 'cpu', **kwargs: Any) -> dict:
        """Loads into the model. Here 'default' is the CPU instead of the GPU."""
        location = 'cpu' if map_location == 'default' else map_location
        return super().load_checkpoint(filename, map_location=location, **kwargs)

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if isinstance(self._optim_cfg, dict):
            self._built = super().build_optim_wrapper(self._optim_cfg, model)
        wrapped = super()._wrap_model(model)
        units = len(FSDP.fsdp_modules(wrapped)) - 1
        self.logger.info(f'FSDP: {units} blocks are gathered one at a time')
        if self._built is not None:
            _require_same_parameters(self._built, wrapped)
            _clip_by_all_ranks(self._built, wrapped)
        return wrapped


def _clip_by_all_ranks(wrapper: OptimWrapper, model: FSDP) -> None:
    def clip(_: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return model.clip_grad_norm_(max_norm, norm_type)

    # Clipping by value works by shards; without clip_grad there is no such function.
    if getattr(wrapper, 'clip_func', None) is torch.nn.utils.clip_grad_norm_:
        wrapper.clip_func = clip


def _require_same_parameters(wrapper: OptimWrapper, model: nn.Module) -> None:
    left = {id(p) for p in model.parameters()}
    if any(id(p) not in left for group in wrapper.optimizer.param_groups for p in group['params']):
        raise OptionError(
            'FSDP has replaced the parameters that the optimizer got; set use_orig_params=True in '
            'strategy.model_wrapper'
        )
