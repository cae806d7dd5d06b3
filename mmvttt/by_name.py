"""Models by name: mmvttt's configs, if OpenMMLab is installed, and timm's registry."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import check_device
from .checkpoints.published import PUBLISHED, SCHEME, SHORT_NAMES
from .distributions import missing
from .errors import UsageError, suggest
from .text import one_line

if TYPE_CHECKING:
    from .named_model import NamedModel
    from .openmmlab.apis.predictor import Predictor

# A model to start from: a name or path, or a config and its checkpoint.
Start = str | os.PathLike[str] | Sequence[str] | None


def resolve(
    model: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> tuple[str, str]:
    """Finds the config and the weights of a model. Published weights have the config's name.

    Raises:
        UsageError: No checkpoint is given, and none is published.
    """
    config = SHORT_NAMES.get(os.fspath(model), os.fspath(model))
    if checkpoint is None and (config not in PUBLISHED or PUBLISHED[config].start_of):
        raise UsageError(f'{config!r} {_without_weights(config)}')
    return config, f'{SCHEME}{config}' if checkpoint is None else os.fspath(checkpoint)


def _without_weights(config: str) -> str:
    """Why a config has no weights, and what to do."""
    if config.endswith(('.pth', '.pt', '.safetensors', '.onnx', '.xml')):
        return 'is a file of weights: give its config first, then the file'
    if find_spec('mmengine') is not None:
        from .openmmlab.config import find_config

        if find_config(config) is not None:
            return 'needs a checkpoint: give it after the config'
    # timm's names, also without a tag.
    timm = {row.timm: name for name, row in PUBLISHED.items() if row.timm}
    timm |= {name.partition('.')[0]: config for name, config in timm.items()}
    if config in timm:
        return f'is a timm name, did you mean {timm[config]!r}?'
    names = ', '.join(n for n, row in PUBLISHED.items() if not row.start_of)
    close = suggest(config, [*PUBLISHED, *SHORT_NAMES]) or f'; published are {names}'
    return f'needs a checkpoint{close}'


def load(
    model: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    device: str | None = None,
    cfg_options: dict[str, Any] | None = None,
    file: str | os.PathLike[str] | None = None,
) -> Predictor:
    """Opens a trained model: its `predict(photo)` returns boxes, scores, masks, labels as arrays.

    Args:
        model: A config (a file, or the name of one of mmvttt's) or 'pedestrians'.
        checkpoint: The weights, by default the published ones (`mmvttt weights`).
        device: Where to run, by default a GPU if there is one.
        cfg_options: Dotted keys of the config and their values.
        file: An .onnx or .xml of `mmvttt export`, which predicts in the model's place on the CPU.

    Raises:
        UsageError: OpenMMLab or the model's toolbox is not installed, or the model is unknown.
        CheckpointError: The checkpoint cannot be read, or would leave parameters at random.
    """
    config, weights = resolve(model, checkpoint)
    _require_openmmlab(repr(config))
    import torch

    from .openmmlab.apis.predictor import open_model
    from .openmmlab.config import load_config

    usual = 'cuda' if torch.cuda.is_available() and file is None else 'cpu'
    device = device or usual
    check_device(device)
    cfg = load_config(config, cfg_options=cfg_options, needed=('model',))
    return open_model(cfg, weights, device, file=file)


def finetune(
    folder: str | os.PathLike[str],
    start: Start = None,
    *,
    work_dir: str | os.PathLike[str] | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    format: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Predictor:
    """Trains on a folder of pictures; see `mmvttt.openmmlab.apis.finetune.finetune`.

    `start` may also be the name of published weights.
    """
    say = _say(folder, say)
    from .openmmlab.apis.finetune import finetune

    options: Any = dict(work_dir=work_dir, minutes=minutes, steps=steps, format=format, say=say)
    return finetune(folder, _names(start), **options)


def plan(
    folder: str | os.PathLike[str],
    start: Start = None,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    format: str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Says what `finetune` would do; see `mmvttt.openmmlab.apis.finetune_plan.plan`."""
    say = _say(folder, say)
    from .openmmlab.apis.finetune_plan import plan

    return plan(folder, _names(start), minutes=minutes, steps=steps, format=format, say=say)


def _names(start: Start) -> list[str] | None:
    """A start as paths that hold in any folder, or as a config and its weights."""
    if start is None:
        return None
    parts = [start] if isinstance(start, str | os.PathLike) else [*start]
    paths = [Path(part).expanduser() for part in parts]
    if len(parts) == 1 and parts[0] != 'small' and not paths[0].exists():
        return [*resolve(parts[0])]
    return [os.fspath(p.resolve() if p.exists() else x) for x, p in zip(parts, paths, strict=True)]


def _say(
    folder: str | os.PathLike[str], say: Callable[[str], None] | None
) -> Callable[[str], None]:
    """Returns the receiver of a report's lines, by default `print` in a notebook."""
    _require_openmmlab('a training')
    say = say or (print if 'ipykernel' in sys.modules else lambda line: None)
    say(f'reads     {one_line(os.fspath(folder))}')
    return say


def _require_openmmlab(what: str) -> None:
    if find_spec('mmengine') is None:
        raise UsageError(f'{what} needs OpenMMLab, and {missing("mmengine")}')


def find_model(
    name: str, options: dict[str, Any] | None = None, weightless: bool = False
) -> NamedModel:
    """Builds a model without its data set. Only timm's names with a tag bring weights.

    Args:
        name: A config file, the name of one of mmvttt's configs (`vittt_t_in1k`), or a model of
            timm's registry, in which mmvttt's are. Configs need OpenMMLab.
        options: Dotted keys of the config and their values, or arguments of timm's model.
        weightless: Build it on the meta device if its code allows that.

    Raises:
        UsageError: The model is unknown, or cannot be built with the options.
    """
    import timm

    from .models import timm as _registers  # noqa: F401
    from .named_model import find_timm

    names, lacking = timm.list_models(), f'; {missing("mmengine")}'
    if find_spec('mmengine') is not None:
        from .openmmlab.analysis.models import of_config
        from .openmmlab.config import config_names, find_config

        if find_config(name) is not None:
            return of_config(name, options, weightless)
        names, lacking = [*config_names(), *names], ''
    if not timm.is_model(name):
        raise UsageError(
            f'there is no model {name!r}{suggest(name, names)}; give the path of a config (….py), '
            "the name of one of mmvttt's, such as vittt_t_in1k, or of a model of timm's registry, "
            f'such as vittt_tiny_patch16_224{lacking}'
        )
    return find_timm(name, options, weightless)


def load_model(
    name: str,
    options: dict[str, Any] | None = None,
    checkpoint: str | None = None,
    key: str | None = None,
) -> NamedModel:
    """A model with weights from a checkpoint, see `load_pretrained`, or as it is initialised."""
    named = find_model(name, options)
    start = checkpoint or named.weights
    if checkpoint:
        from .checkpoints.load import load_pretrained

        load_pretrained(named.model, checkpoint, key=key)
        if named.config is not None:
            from .checkpoints.read import read_content
            from .openmmlab.reliability.settings import warn_of_other_model

            warn_of_other_model(read_content(checkpoint, mmap=True), named.config, checkpoint)
    elif named.config is not None:
        from .openmmlab.analysis.models import initialize

        start = initialize(named)
    print(one_line(f'weights   {start or "random"}'))
    return named
