"""Throughput, latency and peak memory against the size of the image (vision-ttt Fig. 6, Eq. 14)."""

import csv
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

_MEBI = 2**20


@dataclass(frozen=True)
class Measurement:
    """One row of the CSV: what was run, where, and what it took.

    Attributes:
        model: Name of the model.
        mode: 'inference', or 'training' (forward and backward).
        batch: Images at once.
        height, width: Of an image in pixels.
        latency_ms: Median time of a batch; None where memory did not suffice.
        images_per_s: Images in a second at that latency.
        peak_mib: The most that a batch holds at once, by torch's allocator: activations and, in
            training, gradients, not the weights and the images. None as above.
        dtype: Of the computation, by autocast where it is not float32.
        device: Name of the GPU or CPU.
        threads: Of torch on the CPU.
        torch, cuda: Versions.
    """

    model: str
    mode: str
    batch: int
    height: int
    width: int
    latency_ms: float | None
    images_per_s: float | None
    peak_mib: float | None
    dtype: str
    device: str
    threads: int
    torch: str
    cuda: str


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

    Raises:
        ValueError: For fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f'repeats={repeats}: time at least one batch')
    device = torch.device(device)
    network = network.to(device).train(train)
    images = torch.rand(batch, in_channels, *size, device=device)

    def run() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            out = network(images)
        if train:
            network.zero_grad(set_to_none=True)
            sum(x.float().sum() for x in _tensors(out)).backward()

    times = []
    try:
        with torch.set_grad_enabled(train):
            for i in range(warmup + repeats):
                _wait(device)
                start = time.perf_counter()
                run()
                _wait(device)
                if i >= warmup:
                    times.append(time.perf_counter() - start)
            network.zero_grad(set_to_none=True)
            peak = _peak_mib(run, device)
        latency = median(times)
    except torch.OutOfMemoryError:
        latency = peak = None
    finally:
        network.zero_grad(set_to_none=True)
    return Measurement(
        model=name,
        mode='training' if train else 'inference',
        batch=batch,
        height=size[0],
        width=size[1],
        latency_ms=None if latency is None else round(1000 * latency, 3),
        images_per_s=None if latency is None else round(batch / latency, 2),
        peak_mib=None if peak is None else round(peak, 1),
        dtype=str(dtype).removeprefix('torch.'),
        device=_device_name(device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        cuda=torch.version.cuda or '',
    )


def write_csv(rows: Iterable[Measurement], path: str | os.PathLike[str]) -> Path:
    """Writes measurements to a file, whose folder is made; an empty field is out of memory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Measurement)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return path


def plot(rows: Sequence[Measurement], path: str | os.PathLike[str]) -> Path:
    """Draws throughput, latency and memory against the height of the image, a line for a model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout='constrained')
    FigureCanvasAgg(figure)
    panels = {
        'images_per_s': 'images / s',
        'latency_ms': 'ms / batch',
        'peak_mib': 'peak memory, MiB',
    }
    lines: dict[tuple, list[Measurement]] = {}
    for row in rows:
        lines.setdefault((row.model, row.mode, row.batch), []).append(row)
    for axes, (field, label) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for (model, mode, batch), line in lines.items():
            points = [(r.height, getattr(r, field)) for r in line if getattr(r, field) is not None]
            if points:
                label_of_line = f'{model}, {mode}, ×{batch}'
                axes.plot(*zip(*points, strict=True), marker='o', label=label_of_line)
        axes.set(xlabel='height of the image, pixels', ylabel=label)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize='small')
    first = rows[0]
    figure.suptitle(f'{first.device}, {first.dtype}, torch {first.torch}')
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


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


def _device_name(device: torch.device) -> str:
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        named = re.search(r'^model name\s*:\s*(.+)$', Path('/proc/cpuinfo').read_text(), re.M)
        if named:
            return named[1]
    return platform.processor() or platform.machine()
