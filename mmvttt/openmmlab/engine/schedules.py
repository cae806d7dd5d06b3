"""The learning rate of the ImageNet recipes: a linear warm-up, then a cosine over the whole run."""

from __future__ import annotations

import math
from typing import Any

from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.param_scheduler import INF, _ParamScheduler

from mmvttt.arguments import check_part
from mmvttt.errors import OptionError

from ..registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class WarmupCosineLR(LRSchedulerMixin, _ParamScheduler):
    """timm's cosine with warm-up, as the recipes of DeiT, Swin and ViT³ use it, step by step.

    The cosine runs over all steps, the warm-up included, so that the rate falls a little
    at the end of the warm-up. mmengine's two schedules in a row begin the cosine after it, at up
    to a tenth higher rates. With t of T steps and a warm-up of W = ⌊warmup_ratio·T⌋:

        t < W:  lr·(f + (1 − f)·t/W)          t ≥ W:  m + (lr − m)·(1 + cos(π·t/T))/2

    with f = `start_factor` and m = lr·`eta_min_ratio`.

    Args:
        optimizer: The optimizer, or its wrapper.
        warmup_ratio: Part of the run that warms up, in [0, 1): 20 of 300 epochs are 1/15, and a
            shorter run warms up as much shorter.
        start_factor: The first rate over the full one.
        eta_min_ratio: The last rate over the full one.
        end: The whole run, in epochs or steps. mmengine sets it where a config does not.
        by_epoch: Whether `end` counts epochs. `convert_to_iter_based=True` makes steps of them.

    Raises:
        ValueError: If a ratio is out of its range, or the run has no end.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_ratio: float = 1 / 15,
        start_factor: float = 1e-3,
        eta_min_ratio: float = 0.01,
        end: int = INF,
        **kwargs: Any,
    ) -> None:
        for name, value in (
            ('warmup_ratio', warmup_ratio),
            ('start_factor', start_factor),
            ('eta_min_ratio', eta_min_ratio),
        ):
            check_part(name, value)
        if end >= INF:
            raise OptionError('WarmupCosineLR needs the end of the run: set end=…')
        # `_get_value` needs these before the base class takes its first step.
        self.warmup = int(warmup_ratio * end)
        self.start_factor = start_factor
        self.eta_min_ratio = eta_min_ratio
        super().__init__(optimizer, end=end, **kwargs)

    @classmethod
    def build_iter_from_epoch(
        cls, *args: Any, end: int = INF, epoch_length: int = 0, by_epoch: bool = True, **kwargs: Any
    ) -> WarmupCosineLR:
        """The schedule by steps of one that was given by epochs of `epoch_length` steps."""
        if not by_epoch:
            raise OptionError('convert_to_iter_based=True makes steps of epochs: set by_epoch=True')
        kwargs.update(end=end * epoch_length, by_epoch=False)
        return cls(*args, **kwargs)

    def _get_value(self) -> list[float]:
        t = self.last_step
        if t < self.warmup:
            factor = self.start_factor + (1 - self.start_factor) * t / self.warmup
        else:
            cosine = (1 + math.cos(math.pi * min(t / self.end, 1))) / 2
            factor = self.eta_min_ratio + (1 - self.eta_min_ratio) * cosine
        return [value * factor for value in self.base_values]
