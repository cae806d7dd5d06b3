"""Sweeps: variants of configs trained in equal steps, as a table with mean and spread."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.registry import DATASETS, init_default_scope
from torch import Tensor

from mmvttt.analysis.curves import read_scalars
from mmvttt.analysis.flops import count_cost
from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.errors import UsageError
from mmvttt.named_model import image_channels

from ..build_errors import explain_build
from ..config import load_config
from .models import DenseForward, find_model

# File in the folder of each finished training.
RESULT = 'result.json'
# Entries of a schedule that are points in time.
_TIMES = ('begin', 'end', 'T_max', 'milestones')


@dataclass(frozen=True)
class Variant:
    """One point of a sweep.

    Attributes:
        name: Name of its row and folder.
        config: Name or path of a config.
        options: Dotted keys of the config and their values.
    """

    name: str
    config: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """Results of a finished training, in `RESULT` of its folder.

    Attributes:
        variant: Its name.
        seed: Seed of all random numbers.
        metrics: Metrics of the last evaluation.
        loss: Loss of the last logged step, or None.
        step_ms: Median time of a logged step.
        params: Parameters of the model.
        gflops: Multiply-accumulates of one image, 10⁹; None if they cannot be counted.
    """

    variant: str
    seed: int
    metrics: Mapping[str, float]
    loss: float | None
    step_ms: float | None
    params: int
    gflops: float | None


def variants_of(configs: Sequence[str], over: Mapping[str, Any]) -> list[Variant]:
    """Returns every combination of configs and of options' values, which are lists or single ones.

    Their names are the config's, if there are several, and the last words of the keys with values.

    Raises:
        UsageError: Two have the same name.
    """
    lists = [x if isinstance(x, list) else [x] for x in over.values()]
    variants = []
    for config, *values in product(configs, *lists):
        options = dict(zip(over, values, strict=True))
        words = [f'{key.rpartition(".")[2]}={_short(value)}' for key, value in options.items()]
        named = len(configs) > 1 or not words
        name = ','.join([Path(config).stem] * named + words)
        if any(name == other.name for other in variants):
            raise UsageError(f'two variants of the sweep have the name {name}: rename a config')
        variants.append(Variant(name, config, options))
    return variants


def config_of(variant: Variant, options: Mapping[str, Any] | None, steps: int | None) -> Config:
    """Reads a config, merges the options and the variant, and sets the length of the training.

    Raises:
        UsageError: Nothing reads an option, or the config cannot be read.
    """
    cfg = load_config(variant.config, cfg_options={**(options or {}), **variant.options})
    if steps is not None:
        _set_length(cfg, steps)
    cfg.setdefault('default_scope', 'mmengine')
    return cfg


def require_buildable(variants: Sequence[Variant], options: Mapping | None) -> None:
    """Builds every variant's model without weights, before the first is trained.

    Raises:
        UsageError: A model cannot be built: the variant and the reason.
    """
    for variant in variants:
        merged = {**(options or {}), **variant.options}
        try:
            find_model(variant.config, merged, weightless=True)
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f'{variant.name}: {explain_build(error) or error}') from error


def cost_of(
    variant: Variant, options: Mapping | None, size: tuple[int, int] | None = None
) -> tuple[int, float | None]:
    """Counts parameters and GFLOPs of a variant, for an image of (height, width) or the papers'."""
    named = find_model(variant.config, {**(options or {}), **variant.options}, weightless=True)
    params = sum(p.numel() for p in named.model.parameters())
    try:
        cost = count_cost(
            DenseForward(named.model), size or named.size, image_channels(named.model)
        )
    except (UsageError, TypeError):
        return params, None
    return params, cost.total_macs / 1e9


def evaluated_size(cfg: Config) -> tuple[int, int] | None:
    """Returns height and width of the first image that a config evaluates; None without images."""
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    image = DATASETS.build(copy.deepcopy(cfg.val_dataloader.dataset))[0].get('inputs')
    if isinstance(image, Tensor) and image.ndim == 3:
        return image.shape[1], image.shape[2]
    return None


def setting_of(variant: Variant, options: Mapping | None, steps: int | None) -> dict[str, Any]:
    """Settings of a training, after a round trip through JSON."""
    setting = dict(
        config=variant.config, options=options, steps=steps, variant=dict(variant.options)
    )
    return json.loads(json.dumps(setting, default=str))


def saved_run(folder: Path, setting: Mapping[str, Any]) -> Run | None:
    """Result of a training with these settings in its folder, if it has ended.

    Raises:
        UsageError: It is of another sweep, or damaged.
    """
    done = folder / RESULT
    if not done.is_file():
        return None
    try:
        saved = json.loads(done.read_bytes())
        of = saved.pop('setting')
        run = Run(**saved)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f'{done} is damaged ({type(error).__name__}: {error}): remove it, and the same command '
            'writes it again'
        ) from None
    if of != setting:
        raise UsageError(f'{folder} is of another sweep: give another --out, or remove it')
    return run


def result_of(variant: Variant, seed: int, folder: Path, cost: tuple[int, float | None]) -> Run:
    """Reads the log of a training that has ended."""
    train, evaluated = read_scalars(folder)
    losses = list(train.get('loss', {}).values())
    metrics = {name: list(values.values())[-1] for name, values in evaluated.items()}
    times = []
    for file in folder.glob('*/vis_data/scalars.json'):
        entries = map(json.loads, file.read_text().splitlines())
        times += [entry['time'] for entry in entries if 'time' in entry and 'lr' in entry]
    return Run(
        variant.name,
        seed,
        metrics,
        losses[-1] if losses else None,
        1000 * median(times) if times else None,
        *cost,
    )


def table_of(runs: Sequence[Run], variants: Sequence[Variant], metric: str | None) -> str:
    """A Markdown table with a row for each variant that ran, mean ± deviation over the seeds.

    `metric` is the name of an evaluated metric; None for the first that every run has.
    """
    shown = metric or main_metric(runs)
    header = ['variant', 'seeds', shown or 'metric', 'last loss', 'parameters', 'GFLOPs']
    header.append('ms / step')
    rows = []
    for variant in variants:
        group = [run for run in runs if run.variant == variant.name]
        if not group:
            continue
        row = [
            variant.name,
            str(len(group)),
            _spread([run.metrics.get(shown) for run in group], '{:.3g}'),
            _spread([run.loss for run in group], '{:.3f}'),
            f'{group[0].params / 1e6:.2f} M',
            '' if group[0].gflops is None else f'{group[0].gflops:.2f}',
            _spread([run.step_ms for run in group], '{:.0f}'),
        ]
        rows.append(row)
    lines = [header, ['---', *['---:'] * (len(header) - 1)], *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines) + '\n'


def main_metric(runs: Sequence[Run]) -> str | None:
    """The first metric that every run has."""
    shared = [set(run.metrics) for run in runs]
    return next((m for run in runs[:1] for m in run.metrics if all(m in s for s in shared)), None)


def write_csv(runs: Sequence[Run], path: Path) -> Path:
    """Writes a row for each run, with all of its metrics."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    columns = ('variant', 'seed', 'loss', 'step_ms', 'params', 'gflops')
    with replacing(path) as partial, partial.open('w', newline='') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow([*columns, *names])
        for run in runs:
            values = [getattr(run, column) for column in columns]
            writer.writerow([*values, *(run.metrics.get(name) for name in names)])
    return path


def _short(value: Any) -> str:
    """A value as a folder name."""
    return ''.join(c if c.isalnum() or c in '.-_' else '-' for c in str(value))


def _spread(values: Sequence[float | None], style: str) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ''
    middle = style.format(mean(numbers))
    return f'{middle} ± {style.format(stdev(numbers))}' if len(numbers) > 1 else middle


def _set_length(cfg: Config, steps: int) -> None:
    """Sets the length of the training, in whole epochs; schedules in proportion, one test."""
    loop = cfg.train_cfg
    if loop.get('by_epoch') or 'max_epochs' in loop:
        init_default_scope(cfg.get('default_scope') or 'mmengine')
        dataset = DATASETS.build(copy.deepcopy(cfg.train_dataloader.dataset))
        an_epoch = -(-len(dataset) // cfg.train_dataloader.get('batch_size', 1))
        length, key = max(1, round(steps / an_epoch)), 'max_epochs'
    else:
        length, key = steps, 'max_iters'
    part = length / loop[key]
    loop[key] = loop['val_interval'] = length
    schedules = cfg.get('param_scheduler') or []
    for schedule in schedules if isinstance(schedules, list) else [schedules]:
        for name in set(_TIMES) & set(schedule):
            schedule[name] = _scaled(schedule[name], part)
    checkpoint = (cfg.get('default_hooks') or ConfigDict()).get('checkpoint')
    if checkpoint is not None:
        checkpoint.interval = max(1, length // 4)
        checkpoint.max_keep_ckpts = 1


def _scaled(time: Any, part: float) -> Any:
    if isinstance(time, Sequence):
        return [_scaled(t, part) for t in time]
    return max(1, round(time * part)) if isinstance(time, int | float) and time > 0 else time
