"""Compares checkpoints with the model of a runner."""

from typing import Any

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.registry import MODELS
from mmengine.runner import Runner

from mmvttt.checkpoints.load import require_whole
from mmvttt.checkpoints.match import require_match
from mmvttt.checkpoints.read import named_tensors

from ..unwrap import bare_model
from .data.dataset_config import datasets_of


def require_weights(runner: Runner, content: Any, source: str, whole: bool = False) -> None:
    """Compares the `content` of the checkpoint `source` with a runner's model.

    Raises:
        CheckpointError: It has no weights.
        CheckpointMismatchError: See `require_match`, or with `whole` `require_whole`.
    """
    if isinstance(runner.model, dict):
        # FlexibleRunner builds the model later; here names and shapes suffice.
        with torch.device('meta'):
            model = MODELS.build(runner.model)
    else:
        model = bare_model(runner.model)
    (require_whole if whole else require_match)(model, named_tensors(content, source), source)


class ComparePreparation(Hook):
    """Warns if weights were trained on images of another mean or deviation than they get here."""

    def before_train(self, runner: Runner) -> None:
        """Compares what `init_weights` has loaded with the model's `data_preprocessor`."""
        sets = [data for data in datasets_of(runner.cfg) if data.split == 'train']
        if any(name == 'Normalize' for data in sets for name, _ in data.transforms):
            return
        model = bare_model(runner.model)
        preprocessor = getattr(model, 'data_preprocessor', None)
        here = [_numbers(getattr(preprocessor, name, None)) for name in ('mean', 'std')]
        loaded = {
            name: [[round(255 * x, 3) for x in values] for values in module.preparation]
            for name, module in model.named_modules()
            if getattr(module, 'preparation', None)
        }
        for name, there in loaded.items():
            if not all(
                len(a) == len(b) and np.allclose(a, b, rtol=1e-3)
                for a, b in zip(here, there, strict=True)
            ):
                mean, std = there
                runner.logger.warning(
                    f'the weights of {name} were trained on images of mean={mean} and std={std}, '
                    f'and data_preprocessor has mean={here[0] or None} and std={here[1] or None}: '
                    f'set data_preprocessor=dict(mean={mean}, std={std})'
                )


def _numbers(values: torch.Tensor | None) -> list[float]:
    return [] if values is None else [round(x, 3) for x in values.flatten().tolist()]
