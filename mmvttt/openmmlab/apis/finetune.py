"""Fine-tunes a detector, segmentor or classifier on a folder of annotated pictures."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mmvttt.checkpoints.published import PUBLISHED, SCHEME
from mmvttt.checkpoints.sources import find_source
from mmvttt.errors import CheckpointError, DataError, UsageError
from mmvttt.pictures import open_image

from ..config import load_config
from ..datasets.own_folder import OwnFolder, picture_size, read_folder, write_lists
from ..reliability.data.annotations import check_annotations, class_counts, heads_of
from .inference import Predictor, open_model
from .train import train

# By the task: the toolbox, the config that a CPU trains in minutes, its rate, the images of a step,
# its steps over the root of the number of pictures, and what is reported.
_DETECTOR = 'mmdet', 'maskrcnn_vittt_nano_pedestrians', 4e-4, 4, 8
_BOXES = 'coco/bbox_mAP_50', 'coco/bbox_mAP'
_TASKS = {
    'boxes': (*_DETECTOR, _BOXES),
    'masks': (*_DETECTOR, (*_BOXES, 'coco/segm_mAP_50')),
    'maps': ('mmseg', 'upernet_vittt_nano_camvid', 1e-3, 4, 25, ('mIoU',)),
    'classes': ('mmpretrain', 'cifar10_vittt_nano', 1e-3, 32, 6, ('accuracy/top1',)),
}
# Where there is a GPU, which trains it that many times as long.
_COCO, _LONGER = 'maskrcnn_hvit3_t_3x', 8
_PICTURES = 8
_CONFIG = """\
# {pictures} pictures to train, {held_out} to validate. The command reads this file if it exists.
_base_ = ['{base}', 'mmvttt::_base_/small_set.py']

load_from = {weights!r}
classes = {classes!r}
size, batch_size, epochs = {size}, {batch}, {epochs}
model = {model}

train_pipeline = _base_.small_set.{task}.train_pipeline
test_pipeline = _base_.small_set.{task}.test_pipeline
{sizes}
data = dict(type={kind!r}, data_root={root!r}, metainfo=dict(classes=classes))
loader = dict(_delete_=True, {loader})
train_dataloader = dict(
    batch_size=batch_size,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(pipeline=train_pipeline, **data, {train}),
    **loader,
)
val_dataloader = dict(
    batch_size=1,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(pipeline=test_pipeline, **data, {val}),
    **loader,
)
test_dataloader = val_dataloader
val_evaluator = {evaluator}
test_evaluator = val_evaluator

optim_wrapper = _base_.small_set.optim_wrapper
optim_wrapper.optimizer.lr = {rate}
param_scheduler = _base_.small_set.param_scheduler
train_cfg = dict(
    _delete_=True, type='EpochBasedTrainLoop', max_epochs=epochs, val_interval={interval}
)
checkpoint = dict(_delete_=True, type='CheckpointHook', interval={interval}, max_keep_ckpts=1)
default_hooks = dict(checkpoint=checkpoint)
log_processor = dict(by_epoch=True)
randomness = dict(seed=0)
"""


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
        UsageError: `start` is of another task, or the work directory is of another training.
        CheckpointError: The weights cannot be read or downloaded.
    """
    say = _beside_the_log(say)
    root = Path(folder).expanduser().resolve()
    out = Path(work_dir or Path('work_dirs', f'finetune_{root.name}')).resolve()
    data = read_folder(root)
    say(
        f'{root}: {data.format}, {len(data.train)} + {len(data.val)} pictures, {data.task} of '
        f'{", ".join(data.classes[:_PICTURES])}{", …" if len(data.classes) > _PICTURES else ""}'
    )
    for note in data.notes:
        say(f'  {note}')
    config, run = out / 'config.py', out / 'run'
    command = f'# mmvttt finetune {root}{f" --from {start[0]}" if start else ""}'
    if not config.exists():
        base, weights = _choose(start, data.task, say)
        out.mkdir(parents=True, exist_ok=True)
        text = _config(data, dict(write_lists(data, out)), base, weights, steps)
        config.write_text(f'{command}\n{text}', encoding='utf-8')
    elif (former := config.read_text(encoding='utf-8').partition('\n')[0]) != command:
        raise UsageError(f'{os.fspath(out)!r} is of "{former[2:]}": give another --work-dir')
    cfg = load_config(config)
    for findings in check_annotations(cfg, ('train', 'val')):
        if findings.errors:
            raise DataError(f'{findings.key}: {findings.errors[0]}')
        for warning in findings.warnings:
            say(f'  {warning}')
    say(f'starts    from {cfg.load_from or "the weights that its config names"}; config {config}')
    progress = _Progress(_TASKS[data.task][-1], say)
    with _quiet(out / 'output.txt'):
        runner = train(config, work_dir=os.fspath(run), resume='auto', hooks=[progress])
        metrics = progress.metrics or runner.val_loop.run()
        checkpoint = Path((run / 'last_checkpoint').read_text().strip())
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
        predictor = open_model(load_config(config), checkpoint, device)
        for picture in data.val[:_PICTURES]:
            name = '_'.join(picture.path.relative_to(root).with_suffix('.png').parts)
            predictor.predict(picture.path).save(out / 'predictions' / name)
    measure, rows = _by_class(predictor, data, metrics)
    say(f'{"class":24} pictures  {measure}')
    for name, value in list(zip(data.classes, rows, strict=True))[:_PICTURES]:
        count = sum(name in picture.classes for picture in data.val)
        say(f'{name[:24]:24} {count:8}  {value:.3f}')
    say(f'pictures  {out / "predictions"}')
    say(f'predict   mmvttt predict {config} {checkpoint} PICTURE')
    return predictor


@contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Sends what the toolboxes print to a file."""
    with open(log, 'a', encoding='utf-8') as file, redirect_stdout(file), redirect_stderr(file):
        yield


def _beside_the_log(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, which prints to the present stdout while `_quiet` sends it to a file."""
    stdout = sys.stdout

    def line(text: str) -> None:
        with redirect_stdout(stdout):
            say(text)

    return line


class _Progress(Hook):
    """Reports each validation in a line."""

    priority = 'VERY_LOW'

    def __init__(self, keys: tuple[str, ...], say: Callable[[str], None]) -> None:
        self.keys, self.say = keys, say
        self.metrics: Mapping[str, Any] | None = None
        self.start = time.monotonic()

    def before_train(self, runner: Runner) -> None:
        """Says how long the training is."""
        done = f', from step {runner.iter}' if runner.iter else ''
        self.say(
            f'training  {runner.max_iters} steps of {runner.cfg.train_dataloader.batch_size} '
            f'pictures{done}'
        )

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Says what was measured."""
        self.metrics = metrics or {}
        values = (f'{key.rpartition("/")[2]} {self.metrics.get(key, 0):.3f}' for key in self.keys)
        self.say(
            f'  step {runner.iter:4}  {"  ".join(values)}  {time.monotonic() - self.start:.0f} s'
        )


def _choose(
    start: tuple[str, str] | None, task: str, say: Callable[[str], None]
) -> tuple[str, str | None]:
    """The config, and the weights to start from; None where the config itself names them."""
    toolbox, small = _TASKS[task][:2]
    if start is None and toolbox == 'mmdet' and torch.cuda.is_available():
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
    toolbox, small, rate, batch, factor, _ = _TASKS[data.task]
    cfg, gpu = load_config(base), torch.cuda.is_available()
    batch = min(batch, len(data.train))
    if steps is None:
        steps = round(factor * len(data.train) ** 0.5) * (_LONGER if gpu else 1)
    epochs = max(1, round(steps / math.ceil(len(data.train) / batch)))
    model: dict[str, Any] = {}
    for key in class_counts(heads_of(cfg, toolbox)):
        _put(model, f'{key.removeprefix("model.")}.num_classes', len(data.classes))
    test = cfg.test_dataloader.dataset.pipeline
    size = next(t.get('crop_size') or t.scale for t in test[::-1] if {'crop_size', 'scale'} & {*t})
    size = size if isinstance(size, int) else tuple(size)
    task, more, loader = data.task, {}, dict(num_workers=4 if gpu else 0)
    if toolbox == 'mmdet':
        if task == 'boxes' and cfg.model.type == 'MaskRCNN':
            model['type'] = 'FasterRCNN'
            model['roi_head'].update(mask_head=None, mask_roi_extractor=None)
        kind, more = 'CocoDataset', dict(filter_cfg=dict(filter_empty_gt=False))
        evaluator: Any = dict(
            _delete_=True, type='CocoMetric', ann_file=lists['val']['ann_file'], classwise=True,
            metric=['bbox', 'segm'] if task == 'masks' else 'bbox',
        )  # fmt: skip
        sizes = [
            f'train_pipeline[1].with_mask = test_pipeline[2].with_mask = {task == "masks"}',
            'train_pipeline[2].scale = test_pipeline[1].scale = size',
            'train_pipeline[3].crop_size = size[::-1]',
        ]
        task = 'boxes'
    elif toolbox == 'mmseg':
        kind, evaluator = 'BaseSegDataset', dict(type='IoUMetric', iou_metrics=['mIoU'])
        sizes = [
            'train_pipeline[2].scale = test_pipeline[1].scale = size',
            f'train_pipeline[3].crop_size = {tuple(cfg.model.data_preprocessor.size)}',
        ]
    else:
        kind, loader['collate_fn'] = 'CustomDataset', dict(type='default_collate')
        evaluator = [
            dict(type='Accuracy', topk=1),
            dict(type='SingleLabelMetric', items=['recall'], average=None),
        ]
        if base == small:
            # As the backbone's weights, because `load_from` does not resize patches.
            backbone = dict(type='Pretrained', checkpoint=weights, prefix='backbone.')
            model['backbone'], weights = dict(init_cfg=backbone), None
            if min(min(picture_size(picture.path)) for picture in data.train) >= 2 * size:
                size *= 4
                model['backbone'].update(img_size=size, patch_size=16)
        _put(model, 'data_preprocessor.num_classes', len(data.classes))
        sizes = [
            'train_pipeline[1].scale = test_pipeline[1].scale = size',
            'test_pipeline[2].crop_size = size',
        ]
    return _CONFIG.format(
        pictures=len(data.train), held_out=len(data.val), weights=weights, classes=data.classes,
        base=base if base.endswith('.py') else f'mmvttt::{base}.py', size=size, batch=batch,
        epochs=epochs, model=_code(model), task=task, sizes='\n'.join(sizes), kind=kind,
        root=os.fspath(data.root), loader=_arguments(loader), val=_arguments(lists['val']),
        train=_arguments(lists['train'] | more), evaluator=_code(evaluator), rate=rate,
        interval=max(1, epochs // 6),
    )  # fmt: skip


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key."""
    *parts, last = key.split('.')
    for part in parts:
        config = config.setdefault(part, {})
    config[last] = value


def _arguments(values: Mapping[str, Any]) -> str:
    return ', '.join(f'{key}={_code(value)}' for key, value in values.items())


def _code(value: Any) -> str:
    """A value as a config writes it."""
    if isinstance(value, Mapping):
        return f'dict({_arguments(value)})'
    return f'[{", ".join(map(_code, value))}]' if isinstance(value, list) else repr(value)


def _by_class(
    predictor: Predictor, data: OwnFolder, metrics: Mapping[str, Any]
) -> tuple[str, list[float]]:
    """The measure's name and its values."""
    if data.task in ('boxes', 'masks'):
        return 'AP', [metrics.get(f'coco/{name}_precision', math.nan) for name in data.classes]
    if data.task == 'classes':
        return 'correct', [x / 100 for x in metrics['single-label/recall_classwise']]
    count = len(data.classes)
    matrix = np.zeros((count, count))
    for picture in data.val:
        truth = np.asarray(open_image(picture.target)[0])
        labels = predictor.predict(picture.path).labels
        pairs = count * truth.astype(int) + labels
        matrix += np.bincount(pairs[truth < count], minlength=count**2).reshape(count, count)
    both = np.diag(matrix)
    return 'IoU', list(both / np.maximum(matrix.sum(0) + matrix.sum(1) - both, 1))
