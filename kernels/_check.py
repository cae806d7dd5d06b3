"""A kernel checks itself: the first time that an op meets a GPU for which no result is known.

A process of its own compares the kernel with the reference (`_compare`), because an illegal access
ends the process that makes it. The verdict is kept in the user's cache. A kernel that fails leaves
its op to the reference.
"""

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from . import _known

VARIABLE = 'TTT_KERNELS_CHECK'
# Seconds for a check; most of them go into importing torch and compiling.
LIMIT = 180.0
# Exit status of the process; others are crashes.
PASSED, FAILED, NOT_CHECKED = 0, 1, 3


@functools.cache
def _sources() -> str:
    """Digest of this package: every version of the kernels needs its own verdict."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob('*.py')):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def fingerprint(op: str, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """All that a verdict depends on."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    driver = Path('/proc/driver/nvidia/version')
    try:
        ptxas = str(triton.knobs.nvidia.ptxas.version)
    except Exception:  # another Triton, or an AMD GPU
        ptxas = 'unknown'
    return {
        'op': op,
        'dtype': str(dtype).removeprefix('torch.'),
        'gpu': f'{properties.name} {properties.major}.{properties.minor}',
        'driver': driver.read_text().split('\n')[0] if driver.exists() else 'unknown',
        'ptxas': ptxas,
        'triton': triton.__version__,
        'torch': torch.__version__,
        'hip': str(torch.version.hip),
        'kernels': _sources(),
    }


def folder() -> Path:
    """The user's cache; without a home nothing can be written there."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return Path(os.devnull if cache.startswith('~') else cache) / 'ttt_kernels'


def verdicts() -> Iterator[dict[str, Any]]:
    """All verdicts in the cache: a fingerprint with `reason` (None if it passed) and `time`."""
    for path in sorted(folder().glob('*.json')):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(path.read_text())


@functools.cache
def reason(op: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why an op's kernel must not run on an unknown GPU, or None."""
    if os.environ.get(VARIABLE) == '0':
        return None
    key = fingerprint(op, dtype, device)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    path = folder() / f'{name}.json'
    # One process of a machine checks, the others wait for its verdict.
    lock = FileLock(path.with_suffix('.lock'))
    with contextlib.suppress(OSError, NotImplementedError):  # then each process for itself
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return json.loads(path.read_text())['reason']
        print(
            f'ttt_kernels: {op} meets {key["gpu"]} in {key["dtype"]} for the first time; its '
            f'kernel is compared with the reference ({VARIABLE}=0 leaves this out)',
            file=sys.stderr,
        )
        refusal, certain = _run(op, dtype, device)
        if certain:
            with contextlib.suppress(OSError):
                text = json.dumps({**key, 'reason': refusal, 'time': time.time()}, indent=1)
                partial = path.with_suffix(f'.{os.getpid()}')
                partial.write_text(text)
                partial.replace(path)
    finally:
        lock.release()
    return refusal


def command(op: str, dtype: torch.dtype, device: torch.device) -> list[str]:
    """The process that makes a check."""
    name = next(n for n, x in _known.DTYPES.items() if x == dtype)
    module = [sys.executable, '-m', 'ttt_kernels', 'check', op]
    return [*module, '--dtype', name, '--device', str(device)]


def _run(op: str, dtype: torch.dtype, device: torch.device) -> tuple[str | None, bool]:
    """Why the kernel must not run, or None; and whether that will be so the next time."""
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path)), VARIABLE: '0'}
    try:
        done = subprocess.run(
            command(op, dtype, device),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        why = f'took more than {LIMIT:.0f} s'
    else:
        said = (done.stdout.strip().splitlines() or ['it said nothing'])[-1]
        if done.returncode == PASSED:
            return None, True
        if done.returncode == NOT_CHECKED:
            return f'its check could not run: {said}', False
        crashed = done.returncode != FAILED
        how = f'crashed (exit status {done.returncode})' if crashed else 'failed'
        why = f'{how}: {said}'
    report = f'please report this with the output of `python -m ttt_kernels check {op}`'
    return f'its check {why}; {report}', True
