"""Hook that updates MESA's teacher, and switches it on (ViT³ Sec. 5.1)."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import Runner

from mmvttt.arguments import check_int, check_part, check_rate
from mmvttt.errors import OptionTypeError
from mmvttt.openmmlab.registry import HOOKS
from mmvttt.openmmlab.unwrap import bare_model

from .ema import step_decay


@HOOKS.register_module()
class MESAHook(Hook):
    """Updates the teacher of a `mmvttt.MESAClassifier`.

    Args:
        decay: Decay of the average for a step of `base_batch_size` images. A step of b images
            takes `decay ** (b / base_batch_size)`.
        base_batch_size: See `decay`.
        start: Fraction of the training after which the teacher is used, in [0, 1].

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self, decay: float = 0.9996, base_batch_size: int = 4096, start: float = 0.25
    ) -> None:
        check_rate('decay', decay)
        check_part('start', start)
        check_int('base_batch_size', base_batch_size)
        self.decay = decay
        self.base_batch_size = base_batch_size
        self.start = start

    def before_train(self, runner: Runner) -> None:
        """Initialises the teacher of a new run from the student.

        Raises:
            TypeError: If the model has no teacher.
        """
        model = bare_model(runner.model)
        if not hasattr(model, 'update_teacher'):
            raise OptionTypeError(
                f'MESAHook needs a model of type mmvttt.MESAClassifier, got '
                f'{type(model).__name__}: set model.type, or leave the hook out.'
            )
        if runner.iter == 0:
            model.update_teacher(0.0)

    def before_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Switches the teacher on at `start`."""
        bare_model(runner.model).distilling = runner.iter >= self.start * runner.max_iters

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Updates the teacher from the student."""
        decay = step_decay(runner, self.decay, self.base_batch_size)
        bare_model(runner.model).update_teacher(decay)
