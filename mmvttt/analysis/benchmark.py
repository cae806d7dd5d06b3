"""Time, memory and FLOPs of a network's forward pass or training step."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from ..distributions import is_installed
from ..version import __version__
from .fake_run import copy_sharing

_MEBI = 2**20
# Batches before those that count; the first one compiles kernels.
_WARM_UP = 3


def measure(
    network: nn.Module,
    images: Tensor,
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    repeats: int = 10,
) -> dict[str, float]:
    """Measures a network on images `(B, C, H, W)`, on their device.

    Args:
        network: Is set to training or evaluation.
        images: The images.
        dtype: float32, or the type of autocast.
        train: Whether to run the backward pass too.
        repeats: Timed batches, after three others.

    Returns:
        `first_s`, seconds of the first batch, with compilation; `latency_ms` and `spread_ms`,
        median and interquartile range of a batch's wall time; `gpu_ms`, the sum of its kernels'
        times by torch's profiler, on a GPU; `peak_mib`, the peak memory of activations and, in
        training, gradients, without weights and images. Empty if the device is out of memory.
    """
    device = images.device
    network.to(device).train(train)

    def run() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            output = network(images)
        if train:
            sum(x.float().sum() for x in tree_leaves(output)).backward()
            network.zero_grad()

    try:
        with torch.set_grad_enabled(train):
            measured = time_batches(run, device, repeats)
            measured['peak_mib'] = _peak_mib(run, device)
    except torch.OutOfMemoryError:
        network.zero_grad()
        return {}
    return {name: round(value, 3) for name, value in measured.items()}


def time_batches(run: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, float]:
    """The times that `measure` returns, of calls of a function on a device."""
    times = []
    for _ in range(_WARM_UP + repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    low, latency, high = np.percentile(times[-repeats:], (25, 50, 75)).tolist()
    measured = dict(latency_ms=1000 * latency, spread_ms=1000 * (high - low), first_s=times[0])
    return measured | (dict(gpu_ms=_gpu_ms(run)) if device.type == 'cuda' else {})


def _wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def _gpu_ms(run: Callable[[], None], repeats: int = 2) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / repeats / 1e3


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


def has_attention(network: nn.Module) -> bool:
    """Whether a network has attention layers of timm's, see `with_attention`."""
    return any(hasattr(module, 'fused_attn') for module in network.modules())


def with_attention(network: nn.Module, kind: str) -> nn.Module:
    """Returns a network of the same weights whose attention is 'fused' or 'materialised'.

    Materialised attention stores all T² weights of a head, as in the papers' baselines.
    """
    network = copy_sharing(network)
    for module in network.modules():
        if hasattr(module, 'fused_attn'):
            module.fused_attn = kind == 'fused'
    return network


def machine(device: torch.device | str) -> dict[str, Any]:
    """The device by its product name, and the versions with which a measurement was made."""
    return dict(
        device=device_name(torch.device(device)),
        threads=torch.get_num_threads(),
        date=f'{datetime.now(UTC):%Y-%m-%d}',
        commit=_commit(),
        mmvttt=__version__,
        torch=torch.__version__,
        timm=timm.__version__,
        triton=version('triton') if is_installed('triton') else '',
        cuda=torch.version.cuda or '',
    )


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


def _commit() -> str:
    """Short hash of the commit if this package is in a clone, else ''."""
    root = Path(__file__).resolve().parents[2]
    if not (root / '.git').exists():
        return ''
    command = ['git', '-C', str(root), 'rev-parse', '--short', 'HEAD']
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
