"""Compares a checkpoint with the model of a runner before it is loaded."""

import torch
from mmengine.registry import MODELS
from mmengine.runner import Runner

from mmvttt.checkpoints.load import require_whole
from mmvttt.checkpoints.match import require_match
from mmvttt.checkpoints.read import read_weights

from ..unwrap import bare_model


def require_weights(runner: Runner, source: str, whole: bool = False) -> None:
    """Refuses a checkpoint that hardly matches the model of a runner.

    Args:
        runner: The runner.
        source: The checkpoint.
        whole: Refuse one that leaves any parameter at random, too.

    Raises:
        CheckpointError: It cannot be read.
        CheckpointMismatchError: See `require_match` and `require_whole`.
    """
    if isinstance(runner.model, dict):
        # FlexibleRunner builds the model later; here names and shapes suffice.
        with torch.device('meta'):
            model = MODELS.build(runner.model)
    else:
        model = bare_model(runner.model)
    (require_whole if whole else require_match)(model, read_weights(source), source)
