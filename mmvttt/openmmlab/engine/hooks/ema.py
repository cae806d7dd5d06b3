"""A moving average of the weights with a decay by the images of a step (ViT³ Sec. 5.1)."""

from typing import Any

from mmengine import hooks
from mmengine.dist import get_world_size
from mmengine.runner import Runner

from mmvttt.arguments import check_int, check_rate
from mmvttt.errors import OptionTypeError
from mmvttt.openmmlab.registry import HOOKS


@HOOKS.register_module()
class EMAHook(hooks.EMAHook):
    """mmengine's `EMAHook` with `decay ** (b / base_batch_size)` for a step of b images.

    Averages the whole state, including BatchNorm's statistics.

    Args:
        decay: Decay of the average for a step of `base_batch_size` images, in (0, 1).
        base_batch_size: See `decay`.
        kwargs: Arguments of mmengine's `EMAHook`, except `momentum`. Here `update_buffers` is True.
            With `interval`, an update stands for the images of so many steps.

    Raises:
        TypeError: `momentum`, which follows from the decay.
        ValueError: If an option is out of range.
    """

    priority = 'ABOVE_NORMAL'

    def __init__(self, decay: float = 0.9996, base_batch_size: int = 4096, **kwargs: Any) -> None:
        check_rate('decay', decay)
        check_int('base_batch_size', base_batch_size)
        if 'momentum' in kwargs:
            raise OptionTypeError(
                f'EMAHook(momentum={kwargs["momentum"]}): it follows from the decay, give '
                f'decay={1 - kwargs["momentum"]:g} for steps of base_batch_size images'
            )
        super().__init__(**{'update_buffers': True, **kwargs})
        self.decay = decay
        self.base_batch_size = base_batch_size

    def before_train(self, runner: Runner) -> None:
        """Sets the momentum by the images between two updates."""
        decay = step_decay(runner, self.decay, self.base_batch_size)
        self.ema_model.momentum = 1 - decay**self.ema_model.interval
        super().before_train(runner)


def step_decay(runner: Runner, decay: float, base_batch_size: int) -> float:
    """The decay for a step of this training: `decay ** (images / base_batch_size)`."""
    images = runner.train_dataloader.batch_sampler.batch_size * get_world_size()
    return decay ** (images / base_batch_size)
