"""Plan of a fine-tuning: its starting weights, the size of its pictures, its duration."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.device import get_device
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from mmengine.runner import Runner

from mmvttt.checkpoints.published import SCHEME, needs_download, published, published_file
from mmvttt.errors import CheckpointError, UsageError
from mmvttt.text import shown

from ..config import building, load_config
from ..data.own_folder import OwnFolder, as_plan, read_folder
from ..reliability.weights import checkpoints_of
from ..tasks import Start, picture_size, task_for, task_of
from .finetune_config import BEST, CONFIG, SETTINGS, read_settings, write_config
from .train import off_screen

SMALL = 'small'
# Fewer steps than this teach little: a slower start freezes its backbone, then takes smaller
# pictures.
_FEWEST = 100
# Pixels of the smallest pictures that are tried.
_LEAST = 320 * 240
_VALIDATIONS = 10
# Costs of a step by the start's config, and with a frozen backbone: seconds and GB for a megapixel
# in one thread of a CPU (processor time with torch 2.15 on a Xeon), and GB besides.
_COSTS = {
    'maskrcnn_hvit3_t_finetune': ((16.0, 5.5, 1.3), (9.0, 2.2, 1.3)),
    'maskrcnn_vittt_nano_pedestrians': ((3.0, 1.5, 1.1),),
    'upernet_hvit3_t_finetune': ((66.0, 12.0, 1.3), (57.0, 7.6, 1.3)),
    'fpn_vittt_nano_finetune': ((4.3, 1.3, 1.2),),
    'hvit3_t_finetune': ((10.0, 4.0, 1.2), (4.0, 0.6, 1.2)),
    'cifar10_vittt_nano': ((0.9, 0.6, 1.0),),
}
# How many such threads a GPU is worth, roughly.
_GPU = 50


@dataclass(frozen=True)
class Request:
    """The options of a call; see `finetune`."""

    start: Sequence[str] | None = None
    minutes: float | None = None
    steps: int | None = None
    format: str | None = None


def default_minutes() -> float:
    """The time for a training, in minutes."""
    return 10.0 if get_device() == 'cpu' else 30.0


def plan(
    folder: str | os.PathLike[str],
    start: Sequence[str] | None = None,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    format: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Estimates what `finetune` would do with a folder, without a model or a network.

    The arguments are those of `finetune`, which measures a step when it starts.

    Returns:
        What `as_plan` returns, and `start`, the weights or config; `frozen`, whether the backbone
        is; `size`, (height, width) of the pictures in pixels; `batch`, `steps`, `minutes`, and
        `memory` in GB; `estimated`, which is True; `download`, whether the weights are still to be
        downloaded, without which the training would start from a smaller model.

    Raises:
        DataError: The folder is in none of the formats, or has errors.
        UsageError: `start` is a model of another task.
    """
    data = read_folder(Path(folder).expanduser().resolve(), format, say=say)
    request = Request(start, minutes, steps, format)
    with off_screen():
        first = choose(data.task, start, say, download=False)
        _, own = _fitted(data, first, request, _estimated)
    taken = ('start', 'frozen', 'size', 'batch', 'steps', 'minutes', 'memory')
    more = {key: own[key] for key in taken} | dict(size=[*own['size']], estimated=True)
    weights = first.weights or ''
    return (
        as_plan(data) | more | dict(download=weights.startswith(SCHEME) and needs_download(weights))
    )


def planned(
    data: OwnFolder,
    lists: Mapping[str, dict],
    request: Request,
    out: Path,
    say: Callable[[str], None],
) -> tuple[str, dict[str, Any]]:
    """The base config and the settings of `finetune_config.entries` for a folder's pictures.

    Args:
        data: The folder.
        lists: Arguments of the data sets, by part.
        request: What the user asks for.
        out: Gets the config of a trial.
        say: Gets lines of the report.
    """

    def cost(base: str, own: dict[str, Any], enough: float) -> tuple[float, float]:
        write_config(out, base, {**own, **lists})
        return _measured(out / CONFIG, enough)

    base, own = _fitted(data, choose(data.task, request.start, say), request, cost)
    return base, {**own, **lists}


def _fitted(
    data: OwnFolder,
    start: Start,
    request: Request,
    cost: Callable[[str, dict[str, Any], float], tuple[float, float]],
) -> tuple[str, dict[str, Any]]:
    """The base config and the settings with which enough steps fit into the time.

    `cost` is called with both, and the seconds that a step may take; it returns the seconds of a
    step and the memory in GB.
    """
    if get_device() != 'cpu':
        start = replace(start, gpu={}, freeze={}, **start.gpu)
    if _typical_side(data) >= 64:
        start = replace(start, large={}, **start.large)
    objects = [len(picture.objects) for picture in (*data.train, *data.val)]
    own: dict[str, Any] = dict(
        task=data.task, classes=list(data.classes), root=os.fspath(data.root),
        start=start.weights or start.config, weights=start.weights, backbone=dict(start.backbone),
        frozen=False, rate=start.rate, size=start.size, crop=start.crop or start.size,
        batch=min(start.batch, len(data.train)), workers=0 if get_device() == 'cpu' else 4,
        most=max(objects), steps=1000, every=1000, patience=5,
    )  # fmt: skip
    minutes = request.minutes or default_minutes()
    enough = _enough(data, own['batch'])
    base = start.config if start.config.endswith('.py') else f'mmvttt::{start.config}.py'
    # A fifth of the time is for validations.
    time_to_train = minutes * 60 * 0.8
    longest = math.inf if request.steps else time_to_train / min(_FEWEST, enough)
    while True:
        freezable = bool(start.freeze) and not own['frozen']
        # A step that would take far too long is not tried: its memory may not be there.
        if not (freezable and _estimated(base, own, 0)[0] > 3 * longest):
            seconds, memory = cost(base, own, time_to_train / (request.steps or enough))
            if seconds <= longest:
                break
        if freezable:
            own['frozen'] = True
            own['backbone'].update(start.freeze)
        elif math.prod(own['size']) <= _LEAST:
            break
        else:
            for key in ('size', 'crop'):
                own[key] = [round(side * 0.75 / 32) * 32 for side in own[key]]
    in_time = max(1, int(time_to_train / seconds))
    # More time than usual is for more steps than usual.
    useful = math.ceil(enough * max(1, minutes / default_minutes()))
    steps = request.steps or min(useful, in_time)
    # To predict a picture takes about half as long as to train on it, unless most of it is frozen.
    validation = len(data.val) * seconds / own['batch'] / (1 if own['frozen'] else 2)
    number = min(_VALIDATIONS, max(2, round(steps * seconds / 4 / validation)))
    own |= dict(
        steps=steps, every=math.ceil(steps / number), memory=round(memory, 1),
        minutes=round((steps * seconds + number * validation) / 60, 1),
    )  # fmt: skip
    return base, own


def _enough(data: OwnFolder, batch: int) -> int:
    """Steps after which this many pictures, objects and classes are usually learned."""
    pictures, classes = len(data.train), len(data.classes)
    if data.task == 'classes':
        steps = 6 * pictures**0.5
    elif data.task == 'maps':
        steps = 30 * pictures**0.5
    else:
        objects = sum(len(picture.objects) for picture in data.train)
        steps = 200 * (objects * classes) ** 0.25 / batch
    # Large sets were still learning after six epochs.
    return round(max(steps, 12 * pictures / batch))


def _typical_side(data: OwnFolder) -> float:
    """The median of the pictures' shorter sides, in pixels."""
    return float(np.median([min(p.image['height'], p.image['width']) for p in data.train]))


def choose(
    task: str, names: Sequence[str] | None, say: Callable[[str], None], *, download: bool = True
) -> Start:
    """The model to start from, by the argument `start` of `finetune`."""
    if not names:
        return _best(task, say, download)
    if [*names] == [SMALL]:
        return task_for(task).starts[-1]
    if len(names) > 1:
        return _given(task, *names)
    if (former := _former(Path(names[0]))) is None:
        raise UsageError(
            f'--from {shown(names[0])} is not of an earlier finetune: give a config and its '
            'checkpoint'
        )
    return former


def _best(task: str, say: Callable[[str], None], download: bool) -> Start:
    """The first start of the task whose weights are there or can be downloaded."""
    *better, small = task_for(task).starts
    for start in better:
        weights = start.weights or ''
        try:
            if needs_download(weights):
                say(f'  downloads {weights}: Ctrl-C and --from {SMALL} do without it')
                if not download:
                    return start
            published_file(weights, lambda line: say(f'  {line}'))
        except CheckpointError as error:
            say(
                f'  {weights} ({published(weights).results}) would be the better start: {error}. '
                f'This one, {small.config}, is for a demonstration'
            )
        else:
            return start
    return small


def _given(task: str, config: str, weights: str) -> Start:
    """A config and its checkpoint: one of the task's, of a user's, or of a backbone alone."""
    *_, small = starts = task_for(task).starts
    weights = os.path.abspath(weights) if os.path.isfile(weights) else weights
    for start in starts:
        if weights in (start.weights, f'{SCHEME}{start.config}'):
            return start
        if config == start.config:
            return replace(start, weights=weights)
    cfg = load_config(config, needed=('model', 'optim_wrapper', 'test_dataloader'))
    if task_of(cfg) is task_for(task):
        size = picture_size(cfg.test_dataloader.dataset.pipeline) or task_of(cfg).size
        crop = (min(size), min(size)) if task == 'maps' else None
        config = os.path.abspath(config) if os.path.isfile(config) else config
        return Start(config, weights, None, small.batch, size, crop)
    if weights not in checkpoints_of(load_config(small.config).model):
        raise UsageError(
            f'--from {shown(f"{config} {weights}")} is a model of {task_of(cfg).toolbox}, and '
            f'{task} need one of {task_for(task).toolbox}: leave it out, or give --from {SMALL}'
        )
    # From a backbone: AP50 .66 after 100 steps, .13 after 20.
    return replace(small, weights=None, rate=1e-3, size=(256, 320))


def _former(path: Path) -> Start | None:
    """The start of an earlier fine-tuning: its folder, its config, or a checkpoint in it."""
    folder = next((f for f in (path, *path.parents[:2]) if (f / SETTINGS).is_file()), path)
    if not (settings := read_settings(folder)):
        return None
    checkpoint = path if path.suffix == '.pth' else checkpoint_in(folder)
    if checkpoint is None:
        raise UsageError(f'{shown(folder)} has no checkpoint yet: start it, or leave out --from')
    names = ('rate', 'batch', 'size', 'crop', 'backbone')
    taken = {key: settings['own'][key] for key in names}
    taken['backbone'].pop('init_cfg', None)
    return Start(settings['_base_'], os.fspath(checkpoint), **taken)


def checkpoint_in(folder: Path, kind: str = BEST) -> Path | None:
    """The best or the last checkpoint of a fine-tuning's folder."""
    if (folder / kind).is_file():
        return folder / kind
    best = sorted((folder / 'run').glob('best_*.pth'), key=os.path.getmtime)
    if kind == BEST and best:
        return best[-1]
    last = sorted((folder / 'run').glob('*.pth'), key=os.path.getmtime)
    return last[-1] if last else None


def _measured(config: Path, enough: float) -> tuple[float, float]:
    """Seconds of a training step, and the memory of it in GB: on a CPU of the whole program.

    The model has random weights, which take as long. The fastest of five steps counts, because the
    first ones allocate and compile; a step of `enough` seconds or less is the last.
    """
    cfg, device = load_config(config), get_device()
    with building(cfg):
        model = MODELS.build(cfg.model).to(device).train()
        optimizer = build_optim_wrapper(model, cfg.optim_wrapper)
        batches = iter(Runner.build_dataloader(cfg.train_dataloader, seed=0))
    seconds = math.inf
    for _ in range(5):
        if seconds <= enough:
            break
        begin = time.perf_counter()
        model.train_step(next(batches), optimizer)
        if device == 'cuda':
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - begin)
    return seconds, _memory(device) / 1e9


def _estimated(base: str, own: Mapping[str, Any], enough: float) -> tuple[float, float]:
    """`_measured` by `_COSTS`, of an unlisted config by the most of its task."""
    name = base.rpartition(':')[2].removesuffix('.py')
    costs = _COSTS.get(name) or _COSTS[task_for(own['task']).starts[0].config]
    seconds, memory, program = costs[-1 if own['frozen'] else 0]
    pixels = own['batch'] * math.prod(own['crop']) / 1e6
    pace = torch.get_num_threads() ** 0.8 if get_device() == 'cpu' else _GPU
    return pixels * seconds / pace, program + pixels * memory


def _memory(device: str) -> float:
    """Most bytes that were allocated; NaN where the system does not say."""
    if device == 'cuda':
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == 'darwin' else 1024
    )
