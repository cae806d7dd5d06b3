"""Sweeps: variants of configs trained in equal steps with several seeds, as a table."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from queue import Queue
from statistics import mean, stdev
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope

from mmvttt.analysis.curves import read_scalars
from mmvttt.analysis.tables import markdown
from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.cli import plain_errors
from mmvttt.errors import UsageError

from ..analysis.models import find_model
from ..config import load_config
from ..reliability.data.annotations import check_paths
from ..reliability.data.dataset_config import datasets_of
from .train import train

# File in the folder of each finished training, with its last loss and metrics.
_RESULT = 'result.json'
# Entries of a schedule that are points in time.
_TIMES = ('begin', 'end', 'T_max', 'milestones')


def variants_of(configs: Sequence[str], over: Mapping[str, Any]) -> dict[str, tuple[str, dict]]:
    """Returns config and options of every combination of configs and values, by its name.

    Names consist of the config's, if there are several, and the last words of the keys with values.
    """
    variants: dict[str, tuple[str, dict]] = {}
    lists = [x if isinstance(x, list) else [x] for x in over.values()]
    for config, *values in product(configs, *lists):
        words = [f'{k.rpartition(".")[2]}={v}' for k, v in zip(over, values, strict=True)]
        if len(configs) > 1 or not words:
            words.insert(0, Path(config).stem)
        name = ''.join(c if c.isalnum() or c in '.-_=,' else '-' for c in ','.join(words))
        if name in variants:
            raise UsageError(f'two variants of the sweep have the name {name}: rename a config')
        variants[name] = config, dict(zip(over, values, strict=True))
    return variants


def write_config(config: str, options: dict[str, Any], steps: int | None, folder: Path) -> Path:
    """Writes a variant's config into its folder, and builds its model without weights.

    Raises:
        UsageError: The folder belongs to another sweep.
    """
    cfg = load_config(config, cfg_options=options)
    if steps is not None:
        _set_length(cfg, steps)
    path, text = folder / 'config.py', cfg.pretty_text.encode()
    if path.is_file() and path.read_bytes() != text:
        raise UsageError(f'{folder} is of another sweep: give another --out, or remove it')
    write_whole(path, text)
    find_model(str(path), weightless=True)
    return path


def free_devices() -> Queue[str]:
    """The values of CUDA_VISIBLE_DEVICES for trainings side by side: each GPU, or none."""
    gpus = [str(i) for i in range(torch.cuda.device_count())]
    if gpus and (visible := os.environ.get('CUDA_VISIBLE_DEVICES')):
        gpus = visible.split(',')
    devices: Queue[str] = Queue()
    for device in gpus or ['']:
        devices.put(device)
    return devices


def train_seed(config: Path, seed: int, devices: Queue[str]) -> dict[str, float]:
    """Trains with a seed, or resumes, unless done; returns the last metrics and loss.

    Raises:
        UsageError: The training failed: the last line of its output.
    """
    folder = config.parent / f'seed{seed}'
    folder.mkdir(exist_ok=True)
    result, output = folder / _RESULT, folder / 'output.txt'
    if not result.is_file():
        device = devices.get()
        command = [sys.executable, '-m', __name__, str(config), str(seed), str(folder)]
        environment = {**os.environ, 'CUDA_VISIBLE_DEVICES': device}
        with output.open('a') as file:
            subprocess.run(command, stdout=file, stderr=file, env=environment)
        devices.put(device)
    if not result.is_file():
        raise UsageError(output.read_text(errors='replace').strip().rpartition('\n')[2])
    return json.loads(result.read_bytes())


def table_of(rows: Sequence[Mapping[str, Any]], metric: str | None) -> str:
    """Returns a Markdown table with a row for each variant, mean ± deviation over its seeds.

    Args:
        rows: A mapping for each training, with its variant, seed, loss and metrics.
        metric: Name of an evaluated metric; None for the first that every training has.

    Raises:
        UsageError: No training has the metric.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    metrics = [name for name in names if name not in ('variant', 'seed', 'loss')]
    if metric not in (None, *metrics):
        raise UsageError(f'no training has the metric {metric!r}; there is {", ".join(metrics)}')
    shared = (name for name in metrics if all(name in row for row in rows))
    shown = metric or next(shared, 'metric')
    lines = []
    for name in dict.fromkeys(row['variant'] for row in rows):
        group = [row for row in rows if row['variant'] == name]
        spreads = _spread(group, shown, '{:.3g}'), _spread(group, 'loss', '{:.3f}')
        lines.append([name, str(len(group)), *spreads])
    return markdown(['variant', 'seeds', shown, 'last loss'], lines) + '\n'


def _spread(rows: Sequence[Mapping[str, Any]], name: str, style: str) -> str:
    numbers = [row[name] for row in rows if name in row]
    if not numbers:
        return ''
    values = [mean(numbers), stdev(numbers)] if len(numbers) > 1 else numbers
    return ' ± '.join(map(style.format, values))


def _set_length(cfg: Config, steps: int) -> None:
    """Sets the length of the training, in whole epochs; schedules in proportion, one test."""
    loop, length, key = cfg.train_cfg, steps, 'max_iters'
    if loop.get('by_epoch') or 'max_epochs' in loop:
        check_paths(datasets_of(cfg), ('train',))
        init_default_scope(cfg.get('default_scope') or 'mmengine')
        dataset = DATASETS.build(copy.deepcopy(cfg.train_dataloader.dataset))
        an_epoch = -(-len(dataset) // cfg.train_dataloader.get('batch_size', 1))
        length, key = max(1, round(steps / an_epoch)), 'max_epochs'
    part = length / loop[key]
    loop[key] = loop['val_interval'] = length
    loop.pop('val_begin', None)
    schedules = cfg.get('param_scheduler') or []
    for schedule in schedules if isinstance(schedules, list) else [schedules]:
        for name in set(_TIMES) & set(schedule):
            schedule[name] = _scaled(schedule[name], part)
    checkpoint = (cfg.get('default_hooks') or {}).get('checkpoint')
    if checkpoint is not None:
        checkpoint.interval = max(1, length // 4)
        checkpoint.max_keep_ckpts = 1


def _scaled(time: Any, part: float) -> Any:
    if isinstance(time, Sequence):
        return [_scaled(t, part) for t in time]
    return max(1, round(time * part)) if isinstance(time, int | float) and time > 0 else time


def _train(config: str, seed: str, folder: str) -> None:
    """Trains or resumes in this process, and writes the result; does not return if stopped."""
    train(config, resume='auto', seed=int(seed), work_dir=folder)
    scalars, evaluated = read_scalars(folder)
    series = dict(loss=scalars.get('loss'), **evaluated)
    last = {name: list(values.values())[-1] for name, values in series.items() if values}
    write_whole(Path(folder, _RESULT), json.dumps(last).encode())


if __name__ == '__main__':
    os.environ.setdefault('LOCAL_RANK', '0')
    with plain_errors():
        _train(*sys.argv[1:])
