"""Hook that logs how much the inner models of TTT mixers learn during training."""

from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import MMDistributedDataParallel, is_model_wrapper
from mmengine.runner import Runner

from mmvttt.analysis.inner_training import LayerTraining, inspect_training
from mmvttt.arguments import check_int
from mmvttt.errors import UsageError

from ..registry import HOOKS
from ..unwrap import bare_model

# Drifts at fp32's rounding, and far from the initial weights.
_OFF, _FAR = 1e-6, 100.0
# Largest ratio of the inner loss after the inner training to before.
_RISE = 0.1


@HOOKS.register_module()
class InnerLoopHook(Hook):
    """Follows the inner training of the first image of a batch, every `interval` steps.

    Logs `inner_drift_min` and `inner_drift_max` over the layers, and the mean inner losses
    `inner_before` and `inner_after` (the first and last mini-batch of a scan, or before and after a
    full-batch step). Warns once for each layer if the drift is 0 or far above 1, or if the inner
    loss rises.

    The image goes through the backbone in evaluation mode, without gradients and random numbers:
    the training is the same with and without the hook. In distributed training only rank 0 does
    this.

    Args:
        interval: Steps between logs.

    Raises:
        ValueError: If the interval is below 1.
    """

    priority = 'NORMAL'

    def __init__(self, interval: int = 100) -> None:
        check_int('interval', interval)
        self.interval = interval
        self._warned: set[tuple[str, str]] = set()

    def before_train(self, runner: Runner) -> None:
        """Raises a UsageError if the weights are spread over the ranks, or the model generates."""
        model: Any = runner.model
        spread = is_model_wrapper(model) and not isinstance(model, MMDistributedDataParallel)
        if spread or hasattr(bare_model(model), 'transformer'):
            raise UsageError(
                f'mmvttt.InnerLoopHook cannot look into {type(model).__name__}: it follows a '
                'backbone of images with all of its weights; leave it out of custom_hooks'
            )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Logs the scalars, every `interval` steps."""
        if not self.every_n_train_iters(runner, self.interval) or not is_main_process():
            return
        model = bare_model(runner.model)
        first = dict(inputs=data_batch['inputs'][:1], data_samples=None)
        images = model.data_preprocessor(first, False)['inputs']
        layers = inspect_training(getattr(model, 'backbone', model), images, tokens=False)
        scalars = [layer.scalars() for layer in layers]
        drifts = [s['drift'] for s in scalars]
        logged = dict(
            inner_drift_min=min(drifts),
            inner_drift_max=max(drifts),
            inner_before=sum(s['loss_first'] for s in scalars) / len(scalars),
            inner_after=sum(s['loss_last'] for s in scalars) / len(scalars),
        )
        for name, value in logged.items():
            runner.message_hub.update_scalar(f'train/{name}', value)
        for layer, values in zip(layers, scalars, strict=True):
            self._warn(layer, values)

    def _warn(self, layer: LayerTraining, values: dict[str, float]) -> None:
        drift, before, after = (values[n] for n in ('drift', 'loss_first', 'loss_last'))
        reasons = {
            'off': drift < _OFF
            and f'its weights move by {drift:.1e} of their size: the inner loop is off',
            'far': not drift < _FAR
            and f'its weights move by {drift:.3g} times their size: it diverges; a smaller inner '
            'learning rate (eta_base, step) or smaller mini-batches help',
            'rises': after - before > _RISE * abs(before)
            and f'its inner loss rises from {before:.3g} to {after:.3g}: the inner learning rate '
            'is too large for this layer',
        }
        for kind, reason in reasons.items():
            if reason and (layer.name, kind) not in self._warned:
                self._warned.add((layer.name, kind))
                print_log(f'Inner training of {layer.name}: {reason}.', 'current', 30)
