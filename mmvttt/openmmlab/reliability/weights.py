"""The weights that a training starts from: where they come from, and how they fit its classes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from torch import Tensor, nn

from mmvttt.checkpoints.published import PUBLISHED, SCHEME
from mmvttt.checkpoints.read import saved_classes
from mmvttt.checkpoints.sources import find_source
from mmvttt.text import one_line

from ..registry import BUILDING, resolve_type
from ..tasks import class_counts, task_of
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


def load_whole_model(cfg: Config) -> None:
    """Moves the checkpoint of a whole model from its `init_cfg` to `load_from`.

    mmengine would not compare weights of `init_cfg` with the model, and would assign the rows of
    heads by number instead of by class.
    """
    match cfg.model.get('init_cfg'):
        case {'type': 'Pretrained', 'checkpoint': str() as source, **options} if not options:
            cfg.load_from = cfg.get('load_from') or source
            cfg.model.pop('init_cfg')


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

    # Before EMAHook copies the weights.
    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Moves the rows of the classes, and logs which classes are new."""
        model, weights = bare_model(runner.model), checkpoint.get('state_dict', checkpoint)
        if runner._resume or not isinstance(model, nn.Module):
            return
        metainfo = getattr(runner.train_dataloader.dataset, 'metainfo', {})
        classes = list(map(str, metainfo.get('classes') or ()))
        saved = [*(saved_classes(checkpoint) or _published_classes(model, runner._load_from))]
        state, others, fits, numbered = model.state_dict(), [], False, []
        grown = _for_one_more_class(getattr(runner, 'cfg', None), state, len(classes))
        for name in [name for name in state if name in weights]:
            source, target = weights[name], state[name]
            if name not in grown and source.shape == target.shape:
                continue
            layout = name in grown and _layout(model, name, target.shape, grown[name], len(classes))
            rows = fit_rows(source, target, saved, classes, *layout) if layout else None
            fits = fits or rows is not None
            if rows is None and source.shape == target.shape:
                rows = source
                numbered += [] if saved == classes else [name]
            elif rows is None:
                rows = target
                others.append(name)
            weights[name] = rows
        text = {
            'the heads keep the weights of': [x for x in classes if fits and x in saved],
            'the heads are new for': [x for x in classes if fits and x not in saved],
            'initialised randomly, because they have another shape:': others,
        }
        parts = [f'{k} {", ".join(names)}' for k, names in text.items() if names]
        if numbered or (classes and not parts):
            why = (
                f'of {", ".join(numbered)} this is unknown'
                if saved and numbered
                else 'it does not say whose row that is'
            )
            parts.append(f'row k of heads stays with class k: {why}')
        if parts:
            runner.logger.info(one_line(f'{runner._load_from}: {"; ".join(parts)}'))


def _published_classes(model: nn.Module, source: str | None) -> tuple[str, ...]:
    """Names of the classes of published weights, whose files do not name them."""
    name, task = (source or '').removeprefix(SCHEME), task_of(model)
    if name == source or not (task.published_on and getattr(PUBLISHED.get(name), 'authors', '')):
        return ()
    kind: Any = resolve_type(task.published_on, DATASETS, task.toolbox)
    return tuple(kind.METAINFO['classes'])


def _for_one_more_class(cfg: Any, state: Mapping[str, Tensor], count: int) -> dict[str, torch.Size]:
    """Shapes with one more class of the tensors in `state` whose rows belong to `count` classes.

    They are those that differ in the config's model; none where it cannot be built so. Without a
    config they have a row for each class, and perhaps one for the background, and no layer has that
    many inputs.
    """
    if not cfg:
        widths = {count, count + 1} - {x.shape[1] for x in state.values() if x.ndim > 1}
        inside = {'backbone', 'neck'}
        return {
            n: torch.Size((len(x) + 1, *x.shape[1:]))
            for n, x in state.items()
            if count and x.ndim and len(x) in widths and inside.isdisjoint(n.split('.'))
        }
    cfg = copy.deepcopy(cfg)
    heads: Any = task_of(cfg).heads_of(cfg) or {'model': cfg.model}
    for key in class_counts(heads):
        heads[key]['num_classes' if 'num_classes' in heads[key] else 'num_things_classes'] += 1
    # Some models compute with tensors while they are built, which a meta tensor does not allow.
    for device in ('meta', 'cpu') if class_counts(heads) else ():
        try:
            with BUILDING, torch.random.fork_rng(devices=[]), torch.device(device):
                larger = MODELS.build(cfg.model).state_dict()
            return {
                n: x.shape for n, x in larger.items() if n in state and x.shape != state[n].shape
            }
        except Exception:
            # A toolbox may raise any type of error.
            continue
    return {}


def _layout(
    model: nn.Module, name: str, shape: torch.Size, grown: torch.Size, count: int
) -> tuple[int, int, int] | None:
    """How the rows of a tensor belong to `count` classes: `first`, `last` and n of `fit_rows`.

    `grown` is its shape for one more class.
    """
    rows = grown[0] - shape[0]
    if rows < 1 or grown[1:] != shape[1:] or shape[0] % rows:
        return None
    places = {0: (0, 0), 1: (0, 1), 5: (5, 0)}.get(shape[0] // rows - count)
    if places is None or rows == 1:
        return places and (*places, 1)
    while name:
        name = name.rpartition('.')[0]
        head = model.get_submodule(name)
        for key in ('num_attrib', 'cls_out_channels'):
            size = getattr(head, key, None)
            if isinstance(size, int) and size * rows == shape[0]:
                return *places, 1
        # Coordinates of a box for each class.
        if hasattr(head, 'reg_class_agnostic'):
            return *places, rows
    return None


def fit_rows(
    source: Tensor,
    target: Tensor,
    saved: Sequence[str],
    classes: Sequence[str],
    first: int,
    last: int,
    n: int,
) -> Tensor | None:
    """A head's tensor for `classes` with the rows of the classes that `source` knows.

    Args:
        source: `(A · (first + C + last) · n, …)` for A anchors and the C classes `saved`: n rows of
            each class, such as coordinates, `last` for the background, `first` for a box.
        target: The same for `classes`. It provides the rows of classes that `saved` lacks.
        saved, classes: The names of the classes.
        first, last, n: See `source`.

    Returns:
        The tensor, or None if the shapes do not fit or there are no names.
    """
    if not (saved and classes) or source.shape[1:] != target.shape[1:]:
        return None
    widths = [(first + len(names) + last) * n for names in (saved, classes)]
    if len(source) * widths[1] != len(target) * widths[0]:
        return None
    rows = target.clone()
    old, new = (
        x.view(-1, width // n, n, *x.shape[1:])
        for x, width in zip((source, rows), widths, strict=True)
    )
    new[:, :first], new[:, first + len(classes) :] = old[:, :first], old[:, first + len(saved) :]
    for i, name in enumerate(classes):
        if name in saved:
            new[:, first + i] = old[:, first + saved.index(name)]
    return rows
