"""Curves of loss and of the evaluated metrics, from the scalars that mmengine writes."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from .pictures import beside_panel, panels, save
from .tables import markdown

# LocalVisBackend writes one folder for each start (a resumed run has several).
_SCALARS = '*/vis_data/scalars.json'
# Logged with the losses, but not drawn.
_BOOKKEEPING = frozenset({'data_time', 'time', 'epoch', 'iter', 'step', 'memory'})

Series = dict[str, dict[int, float]]
# The training scalars and the evaluated ones of a run.
Run = tuple[Series, Series]


def read_scalars(work_dir: str | os.PathLike[str]) -> Run:
    """All scalars logged in a work directory, over every start and resume.

    Args:
        work_dir: as given to `tools/train.py`.

    Returns:
        The training scalars and the evaluated ones, each as {name: {step: value}}, in order of the
        steps. A later run overwrites the steps that it repeats. A step counts iterations in
        training, and for evaluations what the training loop counts (epochs or iterations).
    """
    files = sorted(Path(work_dir).glob(_SCALARS), key=lambda path: path.parts[-3])
    if not files:
        raise FileNotFoundError(
            f'no {_SCALARS} under {os.fspath(work_dir)}: pass the --work-dir of a run of '
            f'tools/train.py that got as far as its first log line'
        )
    train: Series = {}
    evaluated: Series = {}
    for line in (line for file in files for line in file.read_text(errors='replace').splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            # The last line of a run that was killed while writing.
            continue
        series = train if 'iter' in entry or 'loss' in entry else evaluated
        for name, value in entry.items():
            if name not in _BOOKKEEPING and isinstance(value, int | float):
                series.setdefault(name, {})[entry['step']] = value
    return _ordered(train), _ordered(evaluated)


def plot_curves(
    runs: Mapping[str, Run],
    out: str | os.PathLike[str],
    metrics: Sequence[str] | None = None,
) -> Path:
    """Draws losses, evaluated metrics and learning rates side by side, all runs on the same axes.

    Scalars of `mmvttt.InnerLoopHook` have a panel of their own. For one run every scalar with
    'loss' in its name is drawn, for several only the total. The learning rate is the config's,
    without parameters' own factors.

    Args:
        runs: Results of `read_scalars`, by the runs' names in the legend.
        out: The image file to write; its folder is made.
        metrics: Names of evaluated scalars; default: all that were ever defined.

    Returns:
        `out` as a path.
    """
    evaluated_names = sorted({name for _, evaluated in runs.values() for name in evaluated})
    unknown = [name for name in metrics or () if name not in evaluated_names]
    if unknown:
        raise KeyError(f'{unknown} not evaluated in this run; there are {evaluated_names}')
    if not any(train or evaluated for train, evaluated in runs.values()):
        raise ValueError('the log holds no number of any step: there is nothing to draw')
    with_inner = any(_inner(train) for train, _ in runs.values())
    widths = (3, 3, 2, 2) if with_inner else (3, 3, 2)
    size = ((20 if with_inner else 16) / len(widths), 4.5)
    figure, (left, right, rate, *more) = panels(1, len(widths), size, width_ratios=widths)
    several = len(runs) > 1
    for run, (train, evaluated) in runs.items():
        before = f'{run}: ' if several else ''
        for name, values in train.items():
            if name == 'loss' or ('loss' in name and not several):
                width = 2 if name == 'loss' else 1
                left.plot(*_points(values), label=_label(before + name), linewidth=width)
        for name in metrics or _defined(evaluated):
            if values := evaluated.get(name):
                right.plot(*_points(values), label=_label(before + name), marker='o', markersize=4)
        # mmengine logs base_lr if there are several parameter groups.
        rates = train.get('base_lr') or train.get('lr', {})
        rate.plot(*_points(rates), label=_label(run))
        for panel in more:
            for name, values in _inner(train).items():
                panel.plot(*_points(values), label=_label(before + name.removeprefix('inner_')))
    left.set(title='Training', xlabel='iteration', ylabel='loss')
    right.set(title='Evaluation', xlabel='epoch or iteration', ylabel='metric')
    rate.set(title='Learning rate of the config', xlabel='iteration', ylim=(0, None))
    for panel in more:
        panel.set(title='Inner training', xlabel='iteration', ylabel='drift, loss')
    for axes in (left, right, rate, *more):
        axes.grid(alpha=0.3)
        # Integer ticks, also for a single evaluation.
        axes.locator_params(axis='x', integer=True, min_n_ticks=1)
        if axes.lines and (several or axes is not rate):
            beside_panel(axes, fontsize='small')
    if not several:
        figure.suptitle(_label(next(iter(runs))))
    return save(figure, out, dpi=120)


def spread_table(runs: Mapping[str, Run], metrics: Sequence[str] | None = None) -> str:
    """The last loss and metrics of several runs, with mean and standard deviation (of a sample).

    Returns:
        A Markdown table with a row for each number and a column for each run; runs without the
        number are left out of mean and deviation.
    """
    rows: dict[str, dict[str, float]] = {}
    for run, (train, evaluated) in runs.items():
        for name in ['loss', *(metrics or _defined(evaluated))]:
            values = (train if name == 'loss' else evaluated).get(name)
            if values:
                rows.setdefault(name, {})[run] = list(values.values())[-1]
    lines = []
    for name, by_run in rows.items():
        numbers = list(by_run.values())
        deviation = f'{stdev(numbers):.2g}' if len(numbers) > 1 else '–'
        each = [f'{by_run[run]:.4g}' if run in by_run else '–' for run in runs]
        lines.append([name, f'{mean(numbers):.4g}', deviation, *each])
    return markdown(['last', 'mean', 'deviation', *runs], lines)


def summary(train: Series, evaluated: Series, metrics: Sequence[str] | None = None) -> str:
    """One line for the loss (first, last) and one for each metric (last, best), as text."""
    lines = []
    loss = list(train.get('loss', {}).values())
    if loss:
        lines.append(f'loss {loss[0]:.4g} at first, {loss[-1]:.4g} at last')
    for name in metrics or _defined(evaluated):
        values = evaluated[name]
        last = list(values)[-1]
        best = max(values, key=values.__getitem__)
        lines.append(f'{name} {values[last]:.4g} at {last} (highest {values[best]:.4g} at {best})')
    return '\n'.join(lines)


def _defined(evaluated: Series) -> list[str]:
    """Without curves that are always −1, COCO's value for sizes without an object."""
    return [name for name, values in evaluated.items() if set(values.values()) != {-1}]


def _inner(train: Series) -> Series:
    """Scalars of `mmvttt.InnerLoopHook`."""
    return {name: values for name, values in train.items() if name.startswith('inner_')}


def _label(name: str) -> str:
    """Escapes a name so that matplotlib does not read it as a formula."""
    return name.replace('$', r'\$')


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())


def _ordered(series: Series) -> Series:
    return {name: dict(sorted(values.items())) for name, values in series.items()}
