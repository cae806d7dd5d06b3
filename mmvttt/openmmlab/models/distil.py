"""Feature distillation of a linearized backbone in mmengine's loop."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import Tensor, nn

from mmvttt.arguments import check_choice, check_config, check_int, checked_size
from mmvttt.errors import UsageError
from mmvttt.models.distillation import LOSSES, distillation_losses, new_parameters

from ..registry import HOOKS, MODELS
from ..unwrap import bare_model


@MODELS.register_module()
class Distil(BaseModel):
    """A linearized backbone that learns the tokens of its softmax source, without labels.

    Checkpoints have the twin under `backbone.` and the source under `source.`; `Pretrained` of a
    linearized backbone takes the twin.

    Args:
        backbone: Config of a linearized `mmvttt.TimmViT`, with an `init_cfg` for the source's
            weights, from which both begin.
        loss, depths: See `mmvttt.models.distillation.distillation_losses`.
        sizes: Heights and widths to which the batches of a training are resized, one drawn for
            each; None leaves the pipeline's.
        data_preprocessor, init_cfg: As of mmengine's models.
    """

    def __init__(
        self,
        backbone: Mapping[str, Any],
        loss: str = 'nmse',
        depths: str | Sequence[int] = 'all',
        sizes: Sequence[int | tuple[int, int]] | None = None,
        data_preprocessor: Mapping[str, Any] | None = None,
        init_cfg: Any = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        check_choice('loss', loss, tuple(LOSSES))
        check_config('backbone', backbone, "dict(type='mmvttt.TimmViT', …)")
        if not backbone.get('init_cfg'):
            raise UsageError(
                'model.backbone has no init_cfg, and a source of random weights teaches nothing: '
                "set model.backbone.init_cfg=dict(type='Pretrained', checkpoint=…), the weights "
                'of the softmax model.'
            )
        self.backbone = MODELS.build(backbone)
        if not new_parameters(self.backbone):
            raise UsageError(
                f'{backbone.get("type")} has nothing new to learn: set linearize=dict() in '
                'model.backbone.'
            )
        self.source = MODELS.build({**backbone, 'linearize': None}).requires_grad_(False)
        self.options = dict(loss=loss, depths=depths)
        self.sizes = [checked_size('sizes', size) for size in sizes or ()]
        self.blockwise = False
        # Parameters that learn once the blocks do not learn one by one.
        self._paused: list[nn.Parameter] = []

    def train(self, mode: bool = True) -> 'Distil':
        """Sets the mode of the twin. The source always evaluates."""
        super().train(mode)
        self.source.eval()
        return self

    def forward(self, inputs: Tensor, data_samples: Any = None, mode: str = 'tensor') -> Any:
        """Images `(B, 3, H, W)` → losses with `mode='loss'`, else what the twin returns."""
        if mode != 'loss':
            return self.backbone(inputs)
        if self.sizes:
            size = self.sizes[int(torch.randint(len(self.sizes), ()))]
            inputs = F.interpolate(inputs, size, mode='bicubic', antialias=True)
        return distillation_losses(
            self.source, self.backbone, inputs, blockwise=self.blockwise, **self.options
        )

    def set_blockwise(self, blockwise: bool) -> None:
        """Trains only what is new, each block on the source's inputs, or all of it end to end."""
        self.blockwise = blockwise
        if blockwise:
            new = new_parameters(self.backbone)
            self._paused = [
                p for n, p in self.backbone.named_parameters() if p.requires_grad and n not in new
            ]
        for parameter in self._paused:
            parameter.requires_grad_(not blockwise)


@HOOKS.register_module()
class BlockwiseHook(Hook):
    """Begins the training of a `mmvttt.Distil` with single blocks (see `Distil.set_blockwise`).

    On several GPUs, set `find_unused_parameters=True`: the others have no gradients then.

    Args:
        iters: Number of first iterations that it lasts.
    """

    def __init__(self, iters: int) -> None:
        check_int('iters', iters, 0)
        self.iters = iters

    def before_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Switches at the first iteration of a run or of what is resumed, and at the last one."""
        model: Any = bare_model(runner.model)
        if model.blockwise != (runner.iter < self.iters):
            model.set_blockwise(runner.iter < self.iters)
