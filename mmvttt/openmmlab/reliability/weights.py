"""The weights that a training starts from: where they come from, and how they fit its classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor, nn

from mmvttt.checkpoints.read import saved_classes
from mmvttt.checkpoints.sources import find_source

from ..unwrap import bare_model

# mmengine reads other schemes while it builds a model.
_OURS = ('mmvttt', 'timm', 'http', 'https', 'hf')


def checkpoints_of(config: Any) -> Iterator[str]:
    """The checkpoints that parts of a model's config are initialised from."""
    if isinstance(config, Mapping):
        source = config.get('checkpoint')
        if isinstance(source, str):
            yield source
        config = list(config.values())
    if isinstance(config, list | tuple):
        for part in config:
            yield from checkpoints_of(part)


def locate_checkpoints(cfg: Config) -> None:
    """Downloads the checkpoints that a training starts from, unless they are on this machine.

    Raises:
        CheckpointError: One is missing, or cannot be downloaded.
    """
    for source in dict.fromkeys([*checkpoints_of(cfg.model), cfg.get('load_from') or '']):
        scheme, separator, _ = source.partition('://')
        if source and (not separator or scheme in _OURS):
            find_source(source)


def remove_checkpoints(config: Any) -> None:
    """Removes the checkpoints from a model's config, whose parts keep their other initialisers."""
    if isinstance(config, list | tuple):
        for part in config:
            remove_checkpoints(part)
    elif isinstance(config, dict):
        for key, value in config.items():
            if key == 'init_cfg':
                entries = value if isinstance(value, list | tuple) else [value]
                others = [entry for entry in entries if not any(checkpoints_of(entry))]
                if len(others) < len(entries):
                    config[key] = others or None
            else:
                remove_checkpoints(value)


def warning_of_random_weights(cfg: Config, load_from: str | None) -> str | None:
    """A warning if a recipe for pretrained weights starts from random ones."""
    if not cfg.get('pretrained') or load_from or any(checkpoints_of(cfg.model)):
        return None
    key, backbone = 'model', cfg.model
    while isinstance(backbone.get('backbone'), Mapping):
        key, backbone = f'{key}.backbone', backbone['backbone']
    return (
        'this recipe is meant for pretrained weights, and the model starts from random ones: in '
        'so few steps it will stay far below the published results. Give --cfg-options '
        f'{key}.init_cfg.type=Pretrained {key}.init_cfg.checkpoint=FILE, or pretrained=False if '
        'this is what you want'
    )


class FitHeads(Hook):
    """Fits the heads in `load_from` to the data: a class of the same name keeps its weights."""

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Replaces the tensors for other numbers of classes, and logs which classes are new."""
        model, weights = bare_model(runner.model), checkpoint.get('state_dict', checkpoint)
        if runner._resume or not isinstance(model, nn.Module):
            return
        metainfo = getattr(runner.train_dataloader.dataset, 'metainfo', {})
        classes, saved = metainfo.get('classes') or (), saved_classes(checkpoint)
        state, fitted, new = model.state_dict(), False, []
        for name in [n for n in state if n in weights and weights[n].shape != state[n].shape]:
            rows = fit_rows(weights[name], state[name], saved, classes)
            weights[name] = state[name] if rows is None else rows
            fitted = fitted or rows is not None
            new += [name] if rows is None else []
        text = {
            'the heads keep the weights of': [name for name in classes if fitted and name in saved],
            'the heads are new for': [name for name in classes if fitted and name not in saved],
            'initialised randomly, because they have another shape:': new,
        }
        if what := [f'{k} {", ".join(names)}' for k, names in text.items() if names]:
            runner.logger.info(f'{runner._load_from}: {"; ".join(what)}')


def fit_rows(
    source: Tensor, target: Tensor, saved: Sequence[str], classes: Sequence[str]
) -> Tensor | None:
    """A head's tensor for `classes` with the rows of the classes that `source` knows.

    Args:
        source: `(C · n + b, …)` for the C classes `saved`: n is 1, or 4 for coordinates; b is 1
            with a last row for the background.
        target: `(C' · n + b, …)`, the same for `classes`; has the rows of the other classes.
        saved, classes: The names of the classes.

    Returns:
        The tensor, or None if the shapes are others.
    """
    for n, background in ((1, 0), (1, 1), (4, 0)):
        sizes = [len(names) * n + background for names in (saved, classes)]
        if [len(source), len(target)] == sizes and source.shape[1:] == target.shape[1:]:
            rows = target.clone()
            for i, name in enumerate(classes):
                if name in saved:
                    j = saved.index(name)
                    rows[i * n : (i + 1) * n] = source[j * n : (j + 1) * n]
            if background:
                rows[-1] = source[-1]
            return rows
    return None
