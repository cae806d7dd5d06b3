"""FLOPs, memory, latency and throughput against the size of the image (vision-ttt Fig. 6)."""

from __future__ import annotations

import copy
import csv
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from itertools import accumulate, pairwise, permutations
from pathlib import Path
from statistics import median, quantiles
from typing import Any, get_type_hints

import timm
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ..errors import DataError
from ..models.cuda_graph import Replayed
from ..version import __version__
from .complexity import computed_peak, formula_macs
from .flops import count_cost
from .pictures import panels, save, styled

COMPUTED = 'computed'
_MEBI = 2**20


@dataclass(frozen=True)
class Measurement:
    """One row of the CSV: what was run, where, and what it took.

    Attributes:
        model: Name of the model.
        attention: 'fused' or 'materialised' (all T² weights of a head are stored, as in the
            papers' baselines); '' for a model without softmax attention of timm.
        mode: 'inference', or 'training' (forward and backward).
        batch: Images at once.
        height, width: Of an image in pixels.
        gflops: Counted multiply-accumulates of a batch, 10⁹; None where they were not counted.
        formula_gflops: The same by the papers' formulas, where they have one.
        latency_ms: Median time of a batch; None where memory did not suffice, or computed rows.
        spread_ms: Upper less lower quartile of these times.
        images_per_s: Images in a second at that latency.
        peak_mib: The most that a batch holds at once, activations and, in training, gradients, not
            the weights and the images: by torch's allocator, or by computation. None as above.
        dtype: Of the computation, by autocast where it is not float32.
        device: Name of the GPU or CPU; 'computed' where nothing was run.
        threads: Of torch on the CPU.
        date: Day, UTC.
        commit: Of mmvttt's repository, where it runs from one.
        mmvttt, torch, timm, cuda: Versions.
    """

    model: str
    attention: str
    mode: str
    batch: int
    height: int
    width: int
    gflops: float | None
    formula_gflops: float | None
    latency_ms: float | None
    spread_ms: float | None
    images_per_s: float | None
    peak_mib: float | None
    dtype: str
    device: str
    threads: int
    date: str
    commit: str
    mmvttt: str
    torch: str
    timm: str
    cuda: str

    @property
    def line(self) -> str:
        """Label of the line that this row belongs to."""
        name = re.sub(r'_patch\d+|_window\d+|_224\b', '', self.model)
        return f'{name} ({self.attention})' if self.attention else name


def measure(
    network: nn.Module,
    name: str,
    batch: int,
    size: tuple[int, int],
    device: str | torch.device = 'cpu',
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    repeats: int = 10,
    warmup: int = 3,
    in_channels: int = 3,
    cuda_graph: bool = False,
) -> Measurement:
    """Times a network on random images.

    Args:
        network: Takes images `(batch, in_channels, H, W)`; moved to `device`.
        name: What to call it.
        batch: Images at once.
        size: (height, width) in pixels.
        device: Where to run.
        dtype: float32, or the type of autocast.
        train: Whether to run the backward pass too.
        repeats: Batches that are timed; the median counts.
        warmup: Batches before them.
        in_channels: Channels of the images.
        cuda_graph: Replay a CUDA graph of the network; the memory is that of the network itself.

    Raises:
        UsageError: With `cuda_graph`, where `Replayed` raises it: on a CPU, for training.
        ValueError: For fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f'repeats={repeats}: time at least one batch')
    device = torch.device(device)
    network = network.to(device).train(train)
    images = torch.rand(batch, in_channels, *size, device=device)

    def forward(images: torch.Tensor) -> Any:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return network(images)

    def run(forward: Callable[[torch.Tensor], Any] = forward) -> None:
        out = forward(images)
        if train:
            network.zero_grad(set_to_none=True)
            sum(x.float().sum() for x in _tensors(out)).backward()

    times = []
    try:
        with torch.set_grad_enabled(train):
            timed = Replayed(forward) if cuda_graph else forward
            if cuda_graph:
                run(timed)  # records
            for i in range(warmup + repeats):
                _wait(device)
                start = time.perf_counter()
                run(timed)
                _wait(device)
                if i >= warmup:
                    times.append(time.perf_counter() - start)
            network.zero_grad(set_to_none=True)
            peak = _peak_mib(run, device)
    except torch.OutOfMemoryError:
        times, peak = [], None
    finally:
        network.zero_grad(set_to_none=True)
    latency = median(times) if times else None
    quartiles = quantiles(times, n=4) if len(times) > 1 else (0.0, 0.0, 0.0)
    return Measurement(
        model=name,
        mode='training' if train else 'inference',
        batch=batch,
        height=size[0],
        width=size[1],
        latency_ms=None if latency is None else round(1000 * latency, 3),
        spread_ms=None if latency is None else round(1000 * (quartiles[2] - quartiles[0]), 3),
        images_per_s=None if latency is None else round(batch / latency, 2),
        peak_mib=None if peak is None else round(peak, 1),
        dtype=str(dtype).removeprefix('torch.'),
        device=device_name(device),
        threads=torch.get_num_threads(),
        attention='',
        gflops=None,
        formula_gflops=None,
        **versions(),
    )


def compute(
    network: nn.Module,
    name: str,
    batch: int,
    size: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    in_channels: int = 3,
) -> Measurement:
    """Computes FLOPs and memory of a network from shapes, without running it.

    The arguments are those of `measure`; FLOPs are those of inference.

    Raises:
        UsageError: As `count_cost` and `computed_peak`.
    """
    peak = computed_peak(network, size, batch, dtype, train, in_channels)
    return Measurement(
        model=name,
        attention='',
        mode='training' if train else 'inference',
        batch=batch,
        height=size[0],
        width=size[1],
        **count(network, batch, size, in_channels),
        latency_ms=None,
        spread_ms=None,
        images_per_s=None,
        peak_mib=round(peak, 1),
        dtype=str(dtype).removeprefix('torch.'),
        device=COMPUTED,
        threads=torch.get_num_threads(),
        **versions(),
    )


def count(
    network: nn.Module, batch: int, size: tuple[int, int], in_channels: int = 3
) -> dict[str, float | None]:
    """Counts the FLOPs of a batch at inference, and computes them by the papers' formulas.

    The arguments are those of `measure`.

    Returns:
        `gflops` and `formula_gflops` of a row.
    """
    formula = formula_macs(network, size)
    # Counting takes the weights away.
    counted = count_cost(copy.deepcopy(network), size, in_channels).total_macs
    return dict(
        gflops=round(batch * counted / 1e9, 4),
        formula_gflops=None if formula is None else round(batch * formula / 1e9, 4),
    )


def choose_attention(network: nn.Module, kind: str) -> bool:
    """Switches timm's attention to 'fused' or 'materialised'; returns whether there is any."""
    found = [module for module in network.modules() if hasattr(module, 'fused_attn')]
    for module in found:
        module.fused_attn = kind == 'fused'
    return bool(found)


def versions() -> dict[str, str]:
    """Date, commit and versions, as a row has them."""
    root = Path(__file__).resolve().parents[2]
    commit = ''
    if (root / '.git').exists():
        done = subprocess.run(
            ['git', '-C', str(root), 'rev-parse', '--short', 'HEAD'],
            capture_output=True,
            text=True,
            check=False,
        )
        commit = done.stdout.strip()
    return dict(
        date=f'{datetime.now(timezone.utc):%Y-%m-%d}',
        commit=commit,
        mmvttt=__version__,
        torch=torch.__version__,
        timm=timm.__version__,
        cuda=torch.version.cuda or '',
    )


def write_csv(rows: Iterable[Measurement], path: str | os.PathLike[str]) -> Path:
    """Writes measurements to a file, whose folder is made; an empty field is out of memory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Measurement)], lineterminator='\n')
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return path


def read_csv(path: str | os.PathLike[str]) -> list[Measurement]:
    """Reads what `write_csv` has written.

    Raises:
        DataError: The file is missing or another table.
    """
    kinds = get_type_hints(Measurement)
    try:
        with Path(path).open(newline='') as file:
            return [
                Measurement(**{n: _parse(kinds[n], text) for n, text in row.items()})
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f'{os.fspath(path)!r} is no table of tools/benchmark.py: {error}'
        ) from error


def _parse(kind: Any, text: str) -> Any:
    if kind in (str, int):
        return kind(text)
    return float(text) if text else None


PANELS = {
    'gflops': 'GFLOPs (multiply-accumulates)',
    'peak_mib': 'peak memory, MiB',
    'latency_ms': 'ms / batch',
    'images_per_s': 'images / s',
}
_UNITS = {'gflops': 'FLOPs', 'peak_mib': 'memory', 'latency_ms': 'latency'}


def lines_of(rows: Sequence[Measurement], field: str) -> dict[str, list[tuple[float, float]]]:
    """Points (side in pixels, value) of each line, by its label; the side is √(height·width)."""
    several = {
        name: len({getattr(r, name) for r in rows}) > 1 for name in ('mode', 'batch', 'dtype')
    }
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        value = getattr(row, field)
        parts = [str(getattr(row, name)) for name, differs in several.items() if differs]
        if value is not None and value > 0:
            points = found.setdefault(', '.join([row.line, *parts]), [])
            points.append(((row.height * row.width) ** 0.5, value))
    return {name: sorted(points) for name, points in found.items()}


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Slope of the last two points against the tokens, log-log: 1 is linear, 2 is quadratic."""
    if len(points) < 2:
        return None
    (x0, y0), (x1, y1) = points[-2:]
    return math.log(y1 / y0) / (2 * math.log(x1 / x0))


def crossings(rows: Sequence[Measurement], field: str) -> list[tuple[str, str, float]]:
    """Crossings of lines, (line, other line below which it falls, side in pixels), by side.

    Interpolated between the sizes that both have, exactly for costs that are polynomials of second
    degree in the tokens: the difference over the tokens is a straight line.
    """
    found = []
    lines = {name: dict(points) for name, points in lines_of(rows, field).items()}
    for a, b in permutations(lines, 2):
        sides = sorted(set(lines[a]) & set(lines[b]))
        tokens = [side**2 for side in sides]
        gaps = [(lines[a][s] - lines[b][s]) / s**2 for s in sides]
        for (t0, t1), (g0, g1) in zip(pairwise(tokens), pairwise(gaps), strict=True):
            if g0 >= 0 > g1:
                found.append((a, b, (t0 + (t1 - t0) * g0 / (g0 - g1)) ** 0.5))
    return sorted(found, key=lambda crossing: crossing[2])


def describe_crossings(rows: Sequence[Measurement]) -> list[str]:
    """A sentence for each crossing."""
    return [
        f'{_UNITS[field]}: {a} needs less than {b} from {side:.0f}×{side:.0f} pixels on '
        f'({(side / 16) ** 2:.0f} patches of 16×16)'
        for field in _UNITS
        for a, b, side in crossings(rows, field)
    ]


@styled
def plot(
    tables: Sequence[Sequence[Measurement]],
    path: str | os.PathLike[str],
    names: Sequence[str] | None = None,
) -> Path:
    """Draws a row of panels for each table: all that it has, against the side of the image.

    Both axes are logarithmic; the legend has each line's slope against the tokens, dotted lines
    are the papers' formulas, and the upper axis counts patches of 16×16 pixels.

    Args:
        tables: Rows that share their axes.
        path: The image file to write; its folder is made.
        names: Titles of the tables.
    """
    every = [row for rows in tables for row in rows]
    chosen = [name for name in PANELS if any(getattr(row, name) is not None for row in every)]
    figure, axes = panels(len(tables), len(chosen), (6.0, 5.2), _headline(every))
    for i, rows in enumerate(tables):
        sides = sorted({(r.height * r.width) ** 0.5 for r in rows})
        for panel, field in zip(axes[i * len(chosen) :], chosen, strict=False):
            formulas = lines_of(rows, 'formula_gflops') if field == 'gflops' else {}
            for name, points in lines_of(rows, field).items():
                steep = slope(points)
                label = name if steep is None else f'{name}: {steep:.2f}'
                (line,) = panel.plot(
                    *zip(*points, strict=True),
                    '--' if 'materialised' in name else '-',
                    marker='o',
                    label=label,
                )
                if name in formulas:
                    panel.plot(*zip(*formulas[name], strict=True), ':', color=line.get_color(),
                               linewidth=3, alpha=0.6)  # fmt: skip
            panel.set(xscale='log', yscale='log', xlabel='side of the image, pixels',
                      ylabel=PANELS[field])  # fmt: skip
            panel.set_xticks(sides, [f'{side:.0f}' for side in sides], rotation=45)
            panel.minorticks_off()
            panel.tick_params(labelsize=11)
            panel.grid(visible=True)
            if panel.lines:
                panel.legend(title='slope against the patches' if len(sides) > 1 else None,
                             fontsize=10, title_fontsize=10)  # fmt: skip
            top = panel.secondary_xaxis('top')
            top.set_xticks(sides, [f'{(side / 16) ** 2:,.0f}' for side in sides], rotation=45)
            top.minorticks_off()
            top.tick_params(labelsize=11)
            top.set_xlabel('patches of 16×16 pixels')
            if names and field == chosen[0]:
                panel.set_title(names[i], fontweight='bold', loc='left', pad=12)
    return save(figure, path)


def _headline(rows: Sequence[Measurement]) -> str:
    """Origin of the rows, as far as they agree."""
    first = rows[0]
    parts = {
        'device': 'by computation' if first.device == COMPUTED else first.device,
        'mode': first.mode,
        'batch': f'batch {first.batch}',
        'dtype': first.dtype,
        'torch': f'torch {first.torch.partition("+")[0]}',
    }
    agreed = (len({getattr(r, name) for r in rows}) == 1 for name in parts)
    return ', '.join(text for text, same in zip(parts.values(), agreed, strict=True) if same)


def _peak_mib(run: Callable[[], None], device: torch.device) -> float:
    """The most that one more run holds at once, beyond what is there before it."""
    if device.type == 'cuda':
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / _MEBI
    # Else the profiler calls it an error that there is no GPU.
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == '[memory]']
    held = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0) / _MEBI


def _wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def _tensors(out: object) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(out, torch.Tensor):
        return [out]
    inside = out.values() if isinstance(out, dict) else out if isinstance(out, list | tuple) else ()
    return [tensor for item in inside for tensor in _tensors(item)]


def device_name(device: torch.device) -> str:
    """Name of the GPU or CPU, as its maker calls it."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        # Linux, where platform.processor() has nothing to say.
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()
