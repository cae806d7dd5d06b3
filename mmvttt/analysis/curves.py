"""Curves of loss and of the evaluated metrics, from the scalars that mmengine writes."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

# Written by LocalVisBackend, one folder for each start (a resumed run has several).
_SCALARS = '*/vis_data/scalars.json'
# Logged beside the losses; no curve of their own.
_BOOKKEEPING = frozenset({'data_time', 'time', 'epoch', 'iter', 'step', 'memory'})

_LARGEST = 2**53

Series = dict[str, dict[int, float]]


def read_scalars(work_dir: str | os.PathLike[str]) -> tuple[Series, Series]:
    """All that was logged in a work directory, over every start and resume.

    Args:
        work_dir: as given to `tools/train.py`.

    Returns:
        The training scalars and the evaluated ones, each as {name: {step: value}}, in order of the
        steps. A later run overwrites the steps that it repeats. A step counts iterations in
        training, and for evaluations what the training loop counts (epochs or iterations).

    Raises:
        FileNotFoundError: if nothing was logged there.
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
        except (ValueError, RecursionError):
            # The last line of a run that was killed while it wrote.
            continue
        if not isinstance(entry, dict) or not isinstance(entry.get('step'), int):
            continue
        if abs(entry['step']) > _LARGEST:
            continue
        series = train if 'iter' in entry or 'loss' in entry else evaluated
        for name, value in entry.items():
            # Of integers JSON has larger ones than a float can be.
            number = type(value) is float or (type(value) is int and abs(value) <= _LARGEST)
            if name not in _BOOKKEEPING and number and name.isprintable():
                series.setdefault(name, {})[entry['step']] = value
    return _ordered(train), _ordered(evaluated)


def plot_curves(
    train: Series,
    evaluated: Series,
    out: str | os.PathLike[str],
    metrics: Sequence[str] | None = None,
) -> Path:
    """Draws the losses, the evaluated metrics and the learning rate, side by side.

    Args:
        train: training scalars, from `read_scalars`; those whose name holds 'loss', those of
            `mmvttt.InnerLoopHook` and `lr` (of the first group of parameters) are drawn.
        evaluated: evaluated scalars.
        out: the image file to write; its folder is made.
        metrics: names among `evaluated` to draw; default all that were ever defined.

    Returns:
        `out` as a path.

    Raises:
        KeyError: for a metric that was never evaluated.
        ValueError: where there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unknown = [name for name in metrics or () if name not in evaluated]
    if unknown:
        raise KeyError(f'{unknown} not evaluated in this run; there are {sorted(evaluated)}')
    if not (train or evaluated):
        raise ValueError('the log holds no number of any step: there is nothing to draw')
    inner = {name: values for name, values in train.items() if name.startswith('inner_')}
    figure = Figure(figsize=(20 if inner else 16, 4.5), layout='constrained')
    FigureCanvasAgg(figure)
    widths = (3, 3, 2, 2) if inner else (3, 3, 2)
    left, right, rate, *more = figure.subplots(1, len(widths), width_ratios=widths)
    for panel in more:
        for name, values in inner.items():
            panel.plot(*_points(values), label=_label(name.removeprefix('inner_')))
        panel.set(title='Inner training: drift and loss', xlabel='iteration')
    for name, values in train.items():
        if 'loss' in name:
            left.plot(*_points(values), label=_label(name), linewidth=2 if name == 'loss' else 1)
    for name in metrics or _defined(evaluated):
        right.plot(*_points(evaluated[name]), label=_label(name), marker='o', markersize=4)
    left.set(title='Training', xlabel='iteration', ylabel='loss')
    right.set(title='Held-out images', xlabel='evaluated at (epoch or iteration)')
    rate.plot(*_points(train.get('lr', {})))
    rate.set(title='Learning rate', xlabel='iteration', ylim=(0, None))
    for axes in (left, right, rate, *more):
        axes.grid(alpha=0.3)
        # Whole steps, of a single evaluation too.
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        if axes is not rate and axes.lines:
            axes.legend(fontsize='small')
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    return out


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
    """Without those that are always −1: COCO's figure for sizes of which the set has no object."""
    return [name for name, values in evaluated.items() if set(values.values()) != {-1}]


def _label(name: str) -> str:
    """A name as matplotlib writes it, and not as a formula."""
    return name.replace('$', r'\$')


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())


def _ordered(series: Series) -> Series:
    return {name: dict(sorted(values.items())) for name, values in series.items()}
