"""FLOPs, memory, latency and throughput of a network, as rows of a CSV."""

from __future__ import annotations

import copy
import csv
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import timm
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from ..checkpoints.atomic_write import replacing
from ..deploy.cuda_graph import Replayed
from ..errors import DataError
from ..version import __version__
from .complexity import computed_peak, formula_macs
from .flops import count_cost

COMPUTED = 'computed'
_MEBI = 2**20


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of the CSV: the model, the machine and the measurements.

    Attributes:
        model: Name of the model.
        attention: 'fused' or 'materialised' (all T² weights of a head are stored, as in the
            papers' baselines); '' for a model without timm's softmax attention.
        mode: 'inference', or 'training' (forward and backward).
        batch: Images at once.
        height, width: Image size in pixels.
        gflops: Counted multiply-accumulates of a batch, 10⁹; None if they were not counted.
        formula_gflops: The same by the papers' formulas, or None.
        latency_ms: Median time of a batch; None in computed rows and when out of memory.
        spread_ms: Interquartile range of these times.
        images_per_s: Images per second at that latency.
        peak_mib: Peak memory of activations and, in training, gradients, without weights and
            images: by torch's allocator, or by computation. None as above.
        dtype: Dtype of the computation, by autocast if it is not float32.
        device: Name of the GPU or CPU; 'computed' if nothing was run.
        threads: torch's threads on the CPU.
        date: Day, UTC.
        commit: Commit of mmvttt's repository, if it runs from one.
        mmvttt, torch, timm, cuda: Versions.
    """

    model: str
    attention: str = ''
    mode: str
    batch: int
    height: int
    width: int
    gflops: float | None = None
    formula_gflops: float | None = None
    latency_ms: float | None = None
    spread_ms: float | None = None
    images_per_s: float | None = None
    peak_mib: float | None = None
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
        return self._with_attention(re.sub(r'_patch\d+|_window\d+|_224\b', '', self.model))

    @property
    def whole_line(self) -> str:
        """The label where another model has the same short name."""
        return self._with_attention(self.model)

    def _with_attention(self, name: str) -> str:
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
        device: Device to run on.
        dtype: float32, or the type of autocast.
        train: Whether to run the backward pass too.
        repeats: Timed batches; the median is reported.
        warmup: Batches before them.
        in_channels: Channels of the images.
        cuda_graph: Replay a CUDA graph of the network; the memory is without the graph.
    """
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
            sum(x.float().sum() for x in tree_leaves(out)).backward()

    measured: dict[str, Any] = {}
    try:
        with torch.set_grad_enabled(train):
            timed = Replayed(forward) if cuda_graph else forward
            times = []
            # A graph is recorded by its first run.
            for _ in range(warmup + cuda_graph + repeats):
                _wait(device)
                start = time.perf_counter()
                run(timed)
                _wait(device)
                times.append(time.perf_counter() - start)
            network.zero_grad(set_to_none=True)
            measured.update(peak_mib=round(_peak_mib(run, device), 1))
        low, latency, high = np.percentile(times[-repeats:], (25, 50, 75)).tolist()
        measured.update(
            latency_ms=round(1000 * latency, 3),
            spread_ms=round(1000 * (high - low), 3),
            images_per_s=round(batch / latency, 2),
        )
    except torch.OutOfMemoryError:
        pass  # a row without times
    finally:
        network.zero_grad(set_to_none=True)
    return _row(name, batch, size, dtype, train, device=device_name(device), **measured)


def compute(
    network: nn.Module,
    name: str,
    batch: int,
    size: tuple[int, int],
    train: bool = False,
    in_channels: int = 3,
) -> Measurement:
    """Computes FLOPs and memory of a network at fp32 from shapes, without running it.

    Takes the arguments of `measure`; counts the FLOPs of inference.
    """
    peak = round(computed_peak(network, size, batch, train, in_channels), 1)
    counted = count(network, batch, size, in_channels)
    return _row(name, batch, size, torch.float32, train, device=COMPUTED, peak_mib=peak, **counted)


def _row(
    name: str, batch: int, size: tuple[int, int], dtype: torch.dtype, train: bool, **measured: Any
) -> Measurement:
    """A row with the measurements, date and versions."""
    return Measurement(
        model=name,
        mode='training' if train else 'inference',
        batch=batch,
        height=size[0],
        width=size[1],
        dtype=str(dtype).removeprefix('torch.'),
        threads=torch.get_num_threads(),
        date=f'{datetime.now(timezone.utc):%Y-%m-%d}',
        commit=_commit(),
        mmvttt=__version__,
        torch=torch.__version__,
        timm=timm.__version__,
        cuda=torch.version.cuda or '',
        **measured,
    )


def _commit() -> str:
    """Short hash of the commit if this package is in a clone, else ''."""
    root = Path(__file__).resolve().parents[2]
    if not (root / '.git').exists():
        return ''
    command = ['git', '-C', str(root), 'rev-parse', '--short', 'HEAD']
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def count(
    network: nn.Module, batch: int, size: tuple[int, int], in_channels: int = 3
) -> dict[str, float | None]:
    """Counts the FLOPs of a batch at inference, and computes them by the papers' formulas.

    Takes the arguments of `measure`.

    Returns:
        `gflops` and `formula_gflops` of a row.
    """
    formula = formula_macs(network, size)
    # Counting removes the weights.
    counted = count_cost(copy.deepcopy(network), size, in_channels).total_macs
    return dict(
        gflops=round(batch * counted / 1e9, 4),
        formula_gflops=None if formula is None else round(batch * formula / 1e9, 4),
    )


def choose_attention(network: nn.Module, kind: str) -> bool:
    """Switches timm's attention to 'fused' or 'materialised'; returns whether there is any."""
    layers = [module for module in network.modules() if hasattr(module, 'fused_attn')]
    for module in layers:
        module.fused_attn = kind == 'fused'
    return bool(layers)


def write_csv(rows: Iterable[Measurement], path: str | os.PathLike[str]) -> Path:
    """Writes measurements to a file and creates its folder; an empty field means out of memory."""
    path = Path(path)
    with replacing(path) as partial, partial.open('w', newline='') as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Measurement)], lineterminator='\n')
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return path


def read_csv(path: str | os.PathLike[str]) -> list[Measurement]:
    """Reads a file of `write_csv`."""
    kinds = get_type_hints(Measurement)
    try:
        with Path(path).open(newline='') as file:
            return [
                Measurement(**{n: _parse(kinds[n], text) for n, text in row.items()})
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f'{os.fspath(path)!r} is not a table of tools/benchmark.py: {error}'
        ) from error


def _parse(kind: Any, text: str) -> Any:
    if kind in (str, int):
        return kind(text)
    return float(text) if text else None


def _peak_mib(run: Callable[[], None], device: torch.device) -> float:
    """Peak memory of one more run, beyond the memory in use before it."""
    if device.type == 'cuda':
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / _MEBI
    # Else the profiler reports a missing GPU as an error.
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == '[memory]']
    held = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0) / _MEBI


def _wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Product name of the GPU or CPU."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        # On Linux platform.processor() is empty.
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()
