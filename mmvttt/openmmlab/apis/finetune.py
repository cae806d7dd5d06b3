"""Fine-tunes a detector, segmentor or classifier on a folder of annotated pictures."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mmvttt.checkpoints.published import PUBLISHED, SCHEME
from mmvttt.checkpoints.sources import find_source
from mmvttt.errors import CheckpointError, DataError, ResumeError, UsageError
from mmvttt.outputs import check_new_folder

from ..config import load_config
from ..data.annotations import check_annotations
from ..data.own_folder import OwnFolder, picture_size, read_folder, write_lists
from ..reliability.weights import checkpoints_of
from ..tasks import class_counts, task_for
from .predictor import Predictor, open_model
from .train import train

# Where there is a GPU, which trains it that many times as long.
_COCO, _LONGER = 'maskrcnn_hvit3_t_3x', 8
_PICTURES = 8
_CONFIG = """\
# {pictures} pictures to train, {held_out} to validate. The command reads this file if it exists.
_base_ = ['{base}', 'mmvttt::_base_/small_set.py']

load_from = {weights!r}
classes = {classes!r}
size, batch_size, epochs, workers = {size}, {batch}, {epochs}, {workers}
model, small = _base_.model, _base_.small_set
{model}

optim_wrapper, param_scheduler = small.optim_wrapper, small.param_scheduler
optim_wrapper.optimizer.lr = {rate}
train_dataloader, val_dataloader = small.{kind}.train_dataloader, small.{kind}.val_dataloader
train_dataloader.batch_size, val_evaluator = batch_size, small.{kind}.evaluator
train_dataloader.num_workers = val_dataloader.num_workers = workers
train_data, val_data = train_dataloader.dataset, val_dataloader.dataset
train_data.data_root = val_data.data_root = {root!r}
train_data.metainfo = val_data.metainfo = dict(classes=classes)
train_data.update({train})
val_data.update({val})
{lines}
test_dataloader, test_evaluator = val_dataloader, val_evaluator
train_cfg, default_hooks = small.train_cfg, small.default_hooks
log_processor, randomness = small.log_processor, small.randomness
train_cfg.max_epochs = epochs
train_cfg.val_interval = default_hooks.checkpoint.interval = max(1, epochs // 6)
"""
_LINES = {
    'COCO': """\
train_data.pipeline[2].scale = val_data.pipeline[1].scale = size
train_data.pipeline[3].crop_size = size[::-1]
val_evaluator.ann_file = val_data.ann_file""",
    'maps': """\
train_data.pipeline[2].scale = val_data.pipeline[1].scale = size
train_data.pipeline[3].crop_size = model.data_preprocessor.size""",
    'lists': """\
train_data.pipeline[1].scale = val_data.pipeline[1].scale = val_data.pipeline[2].crop_size = size
model.data_preprocessor = dict(model.get('data_preprocessor', {}), num_classes=len(classes))""",
}


def finetune(
    folder: str | os.PathLike[str],
    start: tuple[str, str] | None = None,
    *,
    work_dir: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Predictor:
    """Trains on a folder of pictures from trained weights. The same call resumes a stopped one.

    Args:
        folder: COCO's JSON as Roboflow and CVAT export it, YOLO, Pascal VOC, pictures with label
            maps, or a folder for each class. Without a validation part a fifth is held out.
        start: A config and its weights. By default a detector of COCO where there is a GPU and its
            file can be had, else a small model of mmvttt's.
        work_dir: Folder of the config, the run and the pictures; default:
            `work_dirs/finetune_FOLDER`.
        steps: Length of the training; default: by the number of pictures and the machine.
        say: Gets the lines of the report, e.g. `print`.

    Returns:
        The trained model, as `mmvttt.load` returns it.

    Raises:
        DataError: The folder is in none of the formats, or has errors.
        UsageError: `start` is of another task, or the work directory is of another training or
            cannot be written.
        CheckpointError: The weights cannot be read or downloaded.
    """
    root = Path(folder).expanduser().resolve()
    out = Path(work_dir or Path('work_dirs', f'finetune_{root.name}')).resolve()
    check_new_folder(out)
    data = read_folder(root)
    say(
        f'{root}: {data.format}, {len(data.train)} + {len(data.val)} pictures, {data.task} of '
        f'{", ".join(data.classes[:_PICTURES])}{", …" if len(data.classes) > _PICTURES else ""}'
    )
    for note in data.notes:
        say(f'  {note}')
    config, run = out / 'config.py', out / 'run'
    given = ('--from', start and start[0]), ('--steps', steps)
    options = ''.join(f' {option} {value}' for option, value in given if value)
    command = f'# mmvttt finetune {root}{options}'
    new = not config.exists()
    if new:
        base, weights = _choose(start, data.task, say)
    elif (former := config.read_text(encoding='utf-8').partition('\n')[0]) != command:
        raise UsageError(
            f'{os.fspath(out)!r} is of "{former[2:]}": repeat that, or give another --work-dir'
        )
    out.mkdir(parents=True, exist_ok=True)
    # Again at each call, because the folder may have been corrected since.
    lists = dict(write_lists(data, out))
    if new:
        text = _config(data, lists, base, weights, steps)
        config.write_text(f'{command}\n{text}', encoding='utf-8')
    cfg = load_config(config)
    for findings in check_annotations(cfg, ('train', 'val')):
        if findings.errors:
            if new:
                config.unlink()
            raise DataError(f'{findings.key}: {findings.errors[0]}')
        for warning in findings.warnings:
            say(f'  {findings.key.partition("_")[0]}: {warning}')
    weights = cfg.load_from or ', '.join({*checkpoints_of(cfg.model)}) or 'random weights'
    say(f'starts    from {weights}; config {config}')
    progress = _Progress(task_for(data.task).measures[data.task], say)
    # The toolboxes print to a file.
    with open(out / 'output.txt', 'a') as log, redirect_stdout(log), redirect_stderr(log):
        try:
            runner = train(config, work_dir=os.fspath(run), resume='auto', hooks=[progress])
        except ResumeError as error:
            advice = f'restore the old data, give another --work-dir, or remove {os.fspath(out)!r}'
            raise ResumeError(error.problem, advice) from error
        metrics = progress.metrics or runner.val_loop.run()
        checkpoint = Path((run / 'last_checkpoint').read_text().strip())
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
        predictor = open_model(load_config(config), checkpoint, device)
        for picture in data.val[:_PICTURES]:
            name = '_'.join(picture.path.relative_to(root).with_suffix('.png').parts)
            predictor.predict(picture.path).save(out / 'predictions' / name)
    measure, rows = _by_class(data, metrics, progress.areas)
    say(f'{"class":24} pictures  {measure}')
    for name, count, value in rows[:_PICTURES]:
        say(f'{name[:24]:24} {count:8}  {value:.3f}')
    if more := len(rows[_PICTURES:]):
        say(f'… and {more} more in the log under {run}')
    shown = ', with boxes of scores above 0.5' if measure.endswith('AP') else ''
    say(f'pictures  {out / "predictions"}{shown}')
    paths = shlex.join(map(os.fspath, (config, checkpoint)))
    say(f'predict   mmvttt predict {paths} PICTURE')
    return predictor


class _Progress(Hook):
    """Reports each validation in a line."""

    priority = 'VERY_LOW'

    def __init__(self, keys: tuple[str, ...], say: Callable[[str], None]) -> None:
        self.keys, self.say, self.stdout = keys, say, sys.stdout
        self.metrics: Mapping[str, Any] | None = None
        self.areas: list[Any] = []
        self.start = time.monotonic()

    def before_train(self, runner: Runner) -> None:
        """Says how long the training is."""
        done = f', from step {runner.iter}' if runner.iter else ''
        batch = runner.cfg.train_dataloader.batch_size
        self._say(
            f'training  {runner.max_iters} steps of {batch} pictures{done}; Ctrl-C saves it, and '
            'the same command resumes it'
        )

    def after_val_iter(self, runner: Runner, *args: Any, **options: Any) -> None:
        """Keeps what a segmentor's metric clears at its end: areas by class of each picture."""
        self.areas = list(runner.val_evaluator.metrics[0].results)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Says what was measured."""
        self.metrics = metrics or {}
        values = (f'{key.rpartition("/")[2]} {self.metrics.get(key, 0):.3f}' for key in self.keys)
        seconds = time.monotonic() - self.start
        self._say(f'  step {runner.iter:4}  {"  ".join(values)}  {seconds:.0f} s')

    def _say(self, line: str) -> None:
        with redirect_stdout(self.stdout):
            self.say(line)


def _choose(
    start: tuple[str, str] | None, task: str, say: Callable[[str], None]
) -> tuple[str, str | None]:
    """The config, and the weights to start from; None where the config itself names them."""
    toolbox, small = task_for(task).toolbox, task_for(task).start.config
    if start is None and task_for(task).format == 'COCO' and torch.cuda.is_available():
        try:
            find_source(f'{SCHEME}{_COCO}')
            return _COCO, f'{SCHEME}{_COCO}'
        except CheckpointError as error:
            say(f'  {_COCO} is not the start: {error}')
    if start is None:
        return small, f'{SCHEME}{small}' if small in PUBLISHED else None
    config, weights = start
    scope = load_config(config, needed=('model',)).get('default_scope')
    if scope == toolbox:
        return config, weights
    if f"'{weights}'" not in str(load_config(small).model):
        raise UsageError(
            f'--from {config} is a model of {scope}, and {task} need one of {toolbox}: leave it '
            f'out, which starts from {small}'
        )
    return small, None


def _config(
    data: OwnFolder, lists: Mapping[str, dict], base: str, weights: str | None, steps: int | None
) -> str:
    """The text of the config, without its first line."""
    task = task_for(data.task)
    small, rate, factor = task.start.config, task.start.rate, task.start.steps
    cfg, gpu = load_config(base), torch.cuda.is_available()
    batch = min(task.start.batch, len(data.train))
    heads = (re.sub(r'\.(\d+)', r'[\1]', key) for key in class_counts(task.heads_of(cfg)))
    model = [f'{head}.num_classes = len(classes)' for head in heads]
    test = cfg.test_dataloader.dataset.pipeline
    size = next(t.get('crop_size') or t.scale for t in test[::-1] if {'crop_size', 'scale'} & {*t})
    size = size if isinstance(size, int) else tuple(size)
    if task.format == 'COCO' and weights is None:
        # From a backbone alone: AP50 .66 after 100 steps, .13 after 20, in 155 s of one thread.
        rate, factor, size = 1e-3, 20, (320, 256)
    if steps is None:
        steps = round(factor * len(data.train) ** 0.5) * (_LONGER if gpu else 1)
    epochs = max(1, round(steps / math.ceil(len(data.train) / batch)))
    if data.task == 'boxes' and cfg.model.type == 'MaskRCNN':
        model.append("model.type = 'FasterRCNN'")
        model.append('model.roi_head.update(mask_head=None, mask_roi_extractor=None)')
    if data.task == 'classes' and base == small:
        # As the backbone's weights, because `load_from` does not resize patches.
        backbone = dict(type='Pretrained', checkpoint=weights, prefix='backbone.')
        model.append(f'model.backbone.init_cfg = {backbone}')
        weights = None
        side = min(min(picture_size(p.path).values()) for p in data.train)
        if isinstance(size, int) and side >= 2 * size:
            size *= 4
            model.append('model.backbone.update(img_size=size, patch_size=16)')
    return _CONFIG.format(
        pictures=len(data.train), held_out=len(data.val), weights=weights, classes=data.classes,
        base=base if base.endswith('.py') else f'mmvttt::{base}.py', size=size, batch=batch,
        epochs=epochs, rate=rate, model='\n'.join(model),
        kind=data.task, workers=4 if gpu else 0,
        root=os.fspath(data.root), **lists, lines=_LINES[task.format],
    )  # fmt: skip


def _by_class(
    data: OwnFolder, metrics: Mapping[str, Any], areas: Sequence[Sequence[torch.Tensor]]
) -> tuple[str, list[tuple[str, int, float]]]:
    """The measure's name, and of each class its name, pictures and value."""
    counts = [sum(name in picture.classes for picture in data.val) for name in data.classes]
    if data.task == 'maps':
        shared, union, _, labels = (torch.stack(kind) for kind in zip(*areas, strict=True))
        measure, values = 'IoU', (shared.sum(0) / union.sum(0)).tolist()
        counts = (labels > 0).sum(0).tolist()
    elif data.task == 'classes':
        measure = 'correct'
        values = [x / 100 for x in metrics['single-label/recall_classwise']]
    else:
        # With masks, mmdetection's values of boxes are overwritten.
        measure = 'mask AP' if data.task == 'masks' else 'box AP'
        values = [metrics.get(f'coco/{name}_precision', math.nan) for name in data.classes]
    return measure, list(zip(data.classes, counts, values, strict=True))
