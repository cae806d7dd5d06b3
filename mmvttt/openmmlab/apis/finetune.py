"""Fine-tunes a detector, segmentor or classifier on a folder of annotated pictures."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.errors import DataError, ResumeError, UsageError
from mmvttt.outputs import check_new_folder
from mmvttt.text import command, listed, one_line

from ..config import load_config
from ..data.annotations import check_annotations
from ..data.dataset_config import datasets_of
from ..data.own_folder import OwnFolder, read_folder, write_lists
from ..tasks import task_for
from .finetune_config import BEST, CONFIG, LAST, complete_config, read_settings, write_config
from .finetune_pictures import PICTURES, draw_data, draw_predictions, draw_results
from .finetune_plan import Request, checkpoint_in, default_minutes, planned
from .predictor import Predictor, open_model
from .train import off_screen, train

_LISTED = 20
_HISTORY, _REPORT, _LINES = 'history.jsonl', 'report.json', 'output.txt'
# Column of the table by class, by the first measure of the task.
_RESULTS = {
    'coco/bbox_mAP': 'box AP',
    'coco/segm_mAP': 'mask AP',
    'mIoU': 'IoU',
    'accuracy/top1': 'correct',
}
# Without a validation for so long, a line says the loss.
_SECONDS = 30


def finetune(
    folder: str | os.PathLike[str],
    start: Sequence[str] | None = None,
    *,
    work_dir: str | os.PathLike[str] | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    format: str | None = None,
    say: Callable[[str], None] = print,
) -> Predictor:
    """Trains on a folder of pictures from trained weights. The same call resumes a stopped one.

    Args:
        folder: COCO's JSON, YOLO, Pascal VOC, labelme, CVAT or Label Studio, pictures with label
            maps, or a folder for each class. Without a validation part a fifth is held out.
        start: A config and its checkpoint; the folder of an earlier `finetune` or a checkpoint in
            it; or 'small', a model that comes with mmvttt: a list. By default the best of the task
            whose file is there or can be downloaded.
        work_dir: Folder of the config, the run and the pictures; default:
            `work_dirs/finetune_FOLDER`. A longer training than the one in it is continued in a
            folder beside it.
        minutes: Length of the training; default: 10 on a CPU, 30 on a GPU, or less where that is
            enough.
        steps: Length of the training in steps, in place of `minutes`.
        format: The format of the annotations, see `read_folder`; default: the one that explains the
            folder.
        say: Gets the lines of the report.

    Returns:
        The trained model with its best weights, as `mmvttt.load` returns it. Its `metrics` are the
        results on the validation part, its `table` rows of (class, pictures, result), its `folder`
        the one with the config, the checkpoints and the pictures.

    Raises:
        DataError: The folder is in none of the formats, or has errors.
        UsageError: `start` is of another task, or the work directory is of another training or
            cannot be written.
        CheckpointError: The weights cannot be read or downloaded.
    """
    root = Path(folder).expanduser().resolve()
    out = Path(work_dir or Path('work_dirs', f'finetune_{root.name}')).resolve()
    request = Request(start, minutes, steps, format)
    out, own, begin = _folder(root, out, request)
    check_new_folder(out)
    data = read_folder(root, format, work_dir=out, say=say)
    out.mkdir(parents=True, exist_ok=True)
    say = _recorded(out / _LINES, say)
    say(
        f'{one_line(root)}: {data.format}, {len(data.train)} + {len(data.val)} pictures, '
        f'{data.task} of {listed(data.classes)}'
    )
    for note in data.notes:
        say(f'  {note}')
    cfg, own = _configured(root, data, out, own, request, begin, say)
    height, width = own['size']
    frozen = ' (backbone frozen)' if own['frozen'] else ''
    say(
        f'plan      from {one_line(own["start"])}{frozen}, pictures of {width}×{height}, '
        f'{own["batch"]} a step, {own["steps"]} steps in about {own["minutes"]:g} minutes, '
        f'{own["memory"]} GB'
    )
    say(f'config    {one_line(out / CONFIG)}')
    progress = _Progress(out / _HISTORY, data, say)
    if not (out / _REPORT).is_file():
        draw_data(data, cfg, out / 'data.png')
        say(f'data      {one_line(out / "data.png")}')
        run = os.fspath(out / 'run')
        train(out / CONFIG, work_dir=run, resume='auto', hooks=[progress], silent=True)
    predictor = _finished(out, cfg, progress)
    again: list[Any] = ['mmvttt', 'finetune', root]
    again += ['--minutes', f'{2 * max(minutes or default_minutes(), own["minutes"]):g}']
    again += [] if format is None else ['--format', format]
    again += [] if work_dir is None else ['--work-dir', work_dir]
    _report(predictor, command(*again), progress, say)
    return predictor


def _configured(
    root: Path,
    data: OwnFolder,
    out: Path,
    own: dict[str, Any],
    request: Request,
    begin: Request,
    say: Callable[[str], None],
) -> tuple[Config, dict[str, Any]]:
    """The config of a training and its settings, which are `own` where it was begun before."""
    # Again at each call, because the folder may have been corrected since.
    lists = dict(write_lists(data, out))
    digest = _digest(data, lists)
    if own and own['data'] != digest:
        if checkpoint_in(out) is not None:
            again = command('mmvttt', 'finetune', root, '--from', out)
            raise ResumeError(
                f'the data in {one_line(root)} are others than when {one_line(out)} was trained',
                f'train on from it with `{again}`, or give another --work-dir',
            )
        own = {}
    if not own:
        with off_screen():
            base, own = planned(data, lists, begin, out, say)
        own |= dict(folder=os.fspath(root), request=asdict(request), data=digest)
        write_config(out, base, own)
    cfg = load_config(complete_config(out))
    for findings in check_annotations(cfg, datasets_of(cfg), ('train', 'val')):
        if findings.errors:
            raise DataError(f'{findings.key}: {findings.errors[0]}')
        for warning in findings.warnings:
            say(f'  {findings.key.partition("_")[0]}: {one_line(warning)}')
    return cfg, own


def _folder(root: Path, out: Path, request: Request) -> tuple[Path, dict[str, Any], Request]:
    """The folder of a training, its settings if it was begun, and what it starts from.

    A training of other data or length continues the last one in `out`, in a folder beside it.

    Raises:
        UsageError: The one in `out` is of another folder, or starts from something else.
    """
    place, begin, number = out, request, 1
    # Without a request it is a trial's.
    while (own := read_settings(place).get('own')) and 'request' in own:
        if own['folder'] != os.fspath(root):
            raise UsageError(
                f'{one_line(place)} is of {one_line(own["folder"])}: give another --work-dir'
            )
        if own['request'] == asdict(request):
            return place, own, begin
        if checkpoint_in(place) is None:
            break
        inside = any(Path(name).is_relative_to(place) for name in request.start or ())
        if not inside and request.start not in (None, own['request']['start']):
            raise UsageError(
                f'{one_line(place)} starts from {one_line(own["start"])}: '
                'repeat that, or give another --work-dir'
            )
        if not inside:
            begin = replace(request, start=[os.fspath(place)])
        number += 1
        place = out.with_name(f'{out.name}_{number}')
    return place, {}, begin


def _digest(data: OwnFolder, lists: Mapping[str, Mapping[str, Any]]) -> str:
    """A digest of the pictures' names and of what is annotated in them."""
    digest = hashlib.sha256(json.dumps([data.task, data.classes]).encode())
    for part in ('train', 'val'):
        digest.update(Path(lists[part]['ann_file']).read_bytes())
    return digest.hexdigest()


def _recorded(path: Path, say: Callable[[str], None]) -> Callable[[str], None]:
    """Says a line, and adds it to a file."""

    def say_and_record(line: str) -> None:
        line = one_line(line, sys.maxsize)
        say(line)
        with open(path, 'a', encoding='utf-8') as file:
            file.write(f'{line}\n')

    return say_and_record


class _Progress(Hook):
    """Reports the validations, a line each, and keeps them in a file.

    Attributes:
        history: Of each validation `step`, `loss`, `metrics`, and `by_class`, see `Task`.
    """

    priority = 'VERY_LOW'

    def __init__(self, path: Path, data: OwnFolder, say: Callable[[str], None]) -> None:
        self.path, self.data, self.say = path, data, say
        self.task = task_for(data.task)
        self.keys = self.task.measures[data.task]
        lines = path.read_text(encoding='utf-8').splitlines() if path.is_file() else ()
        self.history: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.results: list[Any] = []
        self.losses: list[float] = []

    @property
    def best(self) -> dict[str, Any]:
        """The validation with the best result, the first of several."""
        return max(self.history, key=lambda entry: entry['metrics'][self.keys[0]])

    @property
    def table(self) -> list[tuple[str, int, float]]:
        """Name, number of validation pictures and best result of each class."""
        names, entry = self.data.classes, self.best['by_class']
        counts = [sum(name in picture.classes for picture in self.data.val) for name in names]
        return list(zip(names, entry.get('pictures', counts), entry['values'], strict=True))

    def before_train(self, runner: Runner) -> None:
        """Says how long the training is."""
        done = f', from step {runner.iter}' if runner.iter else ''
        self.history = [entry for entry in self.history if entry['step'] <= runner.iter]
        self.first, self.begin = runner.iter, time.monotonic()
        self.said = self.begin
        self.say(
            f'training  {runner.max_iters} steps{done}; Ctrl-C saves it, and the same command '
            'resumes it'
        )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Keeps the loss; says it where no validation has said anything for a minute."""
        self.losses.append(float(torch.as_tensor((outputs or {}).get('loss', math.nan)).detach()))
        if time.monotonic() - self.said > _SECONDS:
            self._line(runner, runner.iter + 1, {})

    def after_val_iter(self, runner: Runner, *args: Any, **options: Any) -> None:
        """Keeps what the metric has collected, which it clears at its end."""
        self.results = runner.val_evaluator.metrics[0].results[:]

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Says what was measured."""
        # mmdetection measures nothing where a model finds nothing.
        values: dict[str, Any] = dict.fromkeys(self.keys, 0.0)
        values |= {key: np.asarray(value).tolist() for key, value in (metrics or {}).items()}
        entry = dict(step=runner.iter, loss=float(np.mean(self.losses or math.nan)), metrics=values)
        entry['by_class'] = self.task.by_class(self.data.classes, values, self.results)
        self.history.append(entry)
        text = ''.join(json.dumps(entry) + '\n' for entry in self.history)
        write_whole(self.path, text.encode())
        self._line(runner, runner.iter, values)
        self.losses.clear()

    def _line(self, runner: Runner, step: int, values: Mapping[str, float]) -> None:
        self.said = time.monotonic()
        left = (self.said - self.begin) / max(1, step - self.first) * (runner.max_iters - step)
        parts = [f'loss {np.mean(self.losses):.3f}'] if self.losses else []
        parts += [
            f'{key.rpartition("/")[2]} {values[key]:.3f}' for key in self.keys if key in values
        ]
        if values and self.best['step'] != step:
            best = self.best
            parts.append(f'(best {best["metrics"][self.keys[0]]:.3f}, step {best["step"]})')
        parts.append(f'{left / 60:.0f} min left' if left > 90 else f'{left:.0f} s left')
        self.say(f'  step {step:4}  {"  ".join(parts)}')


def _finished(out: Path, cfg: Config, progress: _Progress) -> Predictor:
    """The trained model with its results; the pictures of the report are written once."""
    for name in (BEST, LAST):
        source = checkpoint_in(out, name)
        if source not in (None, out / name):
            # A second name where the disk has those.
            try:
                os.link(source, out / name)
            except OSError:
                shutil.copyfile(source, out / name)
    predictor = open_model(cfg, out / BEST, 'cuda' if torch.cuda.is_available() else 'cpu')
    predictor.folder, predictor.metrics = out, progress.best['metrics']
    predictor.table = progress.table
    if not (out / _REPORT).is_file():
        draw_results(progress.history, progress.keys, predictor.table, out / 'results.png')
        draw_predictions(predictor, cfg, out)
        content = dict(metrics=predictor.metrics, table=predictor.table)
        write_whole(out / _REPORT, json.dumps(content, indent=1).encode())
    return predictor


def _report(predictor: Any, again: str, progress: _Progress, say: Callable[[str], None]) -> None:
    """Says the results, where the pictures are, and what to do next: `again` trains on."""
    out, best, last = predictor.folder, progress.best, progress.history[-1]
    say(f'{"class":24} pictures  {_RESULTS[progress.keys[0]]}')
    for name, count, value in predictor.table[:_LISTED]:
        say(f'{listed([name], longest=24):24} {count:8}  {value:.3f}')
    if more := len(predictor.table[_LISTED:]):
        say(f'… and {more} more in {one_line(out / _REPORT)}')
    drawn = [out / name for name in PICTURES if (out / name).is_file()]
    say(f'pictures  {listed(drawn, longest=400)}')
    say(f'best      step {best["step"]} of {last["step"]}, {one_line(out / BEST)}; last: {LAST}')
    say(f'predict   {command("mmvttt", "predict", out / CONFIG, out / BEST)} PICTURE')
    if best is last and len(progress.history) > 1:
        say(f'It was still learning: `{again}` trains on from there.')
