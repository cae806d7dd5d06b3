"""Models by name, for those with OpenMMLab and for those without: the roof of both."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .checkpoints.published import PUBLISHED, SCHEME
from .distributions import missing
from .errors import UsageError, suggest

if TYPE_CHECKING:
    from .named_model import NamedModel
    from .openmmlab.apis.inference import Predictor

# Short names of shipped models.
NAMES = {'pedestrians': 'maskrcnn_vittt_nano_pedestrians'}


def resolve(
    model: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> tuple[str, str]:
    """Finds the config and the weights of a model; published weights have the config's name.

    Raises:
        UsageError: There is no checkpoint, and nobody has published one.
    """
    config = NAMES.get(os.fspath(model), os.fspath(model))
    if checkpoint is None and (config not in PUBLISHED or PUBLISHED[config].start_of):
        timm = {row.timm: name for name, row in PUBLISHED.items() if row.timm}
        close = suggest(config, [*PUBLISHED, *NAMES])
        if config in timm:
            close = f', did you mean {timm[config]!r}?'
        names = ', '.join(n for n, row in PUBLISHED.items() if not row.start_of)
        raise UsageError(f'{config!r} needs a checkpoint{close or f"; published are {names}"}')
    return config, f'{SCHEME}{config}' if checkpoint is None else os.fspath(checkpoint)


def load(
    model: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    device: str | None = None,
    cfg_options: dict[str, Any] | None = None,
) -> Predictor:
    """Opens a trained model: its `predict(photo)` returns boxes, scores, masks, labels as arrays.

    Args:
        model: A config: a file, or the name of one of mmvttt's; or 'pedestrians'.
        checkpoint: The weights; may be left out for published ones (`mmvttt weights`).
        device: Where to run; default: a GPU if there is one.
        cfg_options: Dotted keys of the config and their values.

    Raises:
        UsageError: OpenMMLab or the model's toolbox is not installed, or there is no such model.
        CheckpointError: The checkpoint cannot be read, or would leave parameters at random.
    """
    config, weights = resolve(model, checkpoint)
    _require_openmmlab(repr(config))
    import torch

    from .openmmlab.apis.inference import open_model
    from .openmmlab.config import load_config

    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    cfg = load_config(config, cfg_options=cfg_options, needed=('model',))
    return open_model(cfg, weights, device)


def finetune(folder: str | os.PathLike[str], start: str | None = None, **options: Any) -> Predictor:
    """Trains on a folder of pictures, from the published weights of the name `start`.

    The options, and what is raised, are those of `mmvttt.openmmlab.apis.finetune.finetune`.
    """
    named = None if start is None else resolve(start)
    _require_openmmlab('a training')
    from .openmmlab.apis.finetune import finetune

    return finetune(folder, named, **options)


def _require_openmmlab(what: str) -> None:
    if find_spec('mmengine') is None:
        raise UsageError(f'{what} needs OpenMMLab, and {missing("mmengine")}')


def find_model(
    name: str, options: dict[str, Any] | None = None, weightless: bool = False
) -> NamedModel:
    """Finds a config's or timm's model, with its options; without OpenMMLab, timm's only.

    With `weightless` it is on the meta device if its code allows that. A UsageError says that there
    is no such model.
    """
    if find_spec('mmengine') is None:
        from .named_model import find_timm

        return find_timm(name, options, weightless)
    from .openmmlab.analysis import models

    return models.find_model(name, options, weightless)
