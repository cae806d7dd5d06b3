"""A kernel checks itself: the first time that an op meets a GPU for which no result is known.

A process of its own compares output and gradients with the reference in fp64, because an illegal
access ends the process that makes it. The verdict is kept in the user's cache. A kernel that fails
leaves its op to the reference.
"""

import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _known
from ._op import OPS, Args, Op

VARIABLE = 'TTT_KERNELS_CHECK'
# Seconds for a check; most of them go into importing torch and compiling.
LIMIT = 180.0
# Least bounds of errors over the largest value, by dtype: kernels round the operands of products,
# the reference does not. A wrong result is off by 1.
BOUNDS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# The bound of a sum that cancels is the error of the reference in the same dtype times this.
FACTOR = 16
PASSED, FAILED, NOT_CHECKED = 0, 1, 3


# ------------------------------------------------------------------------------ the comparison


class Examples:
    """Random inputs as models have them, in fp64: small tokens, much like their neighbours."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def tokens(self, *shape: int) -> Tensor:
        """`(B, N, …)` of a size between .1 and .4, by image; neighbours correlate by .9."""
        x = self.normal(*shape)
        for t in range(1, shape[1]):
            x[:, t] = 0.9 * x[:, t - 1] + 0.19**0.5 * x[:, t]
        sizes = torch.linspace(0.1, 0.4, shape[0], dtype=torch.float64)
        return x * sizes.view(-1, *[1] * (len(shape) - 1))


def compare(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """How the op's kernel differs from the reference in fp64, or None.

    Raises:
        RuntimeError: The kernel cannot be imported.
    """
    from ._backend import load_kernel

    op, kernel = OPS[name], load_kernel(name)
    if isinstance(kernel, str):
        raise RuntimeError(kernel)
    for exact in op.examples(Examples()):
        given = _cast(op, exact, dtype)
        exact = _cast(op, given, torch.float64)
        expected = _results(op, op.reference, exact)
        rounded = _results(op, op.reference, given)
        on_device = tuple(x.to(device) if isinstance(x, Tensor) else x for x in given)
        found = _results(op, kernel, on_device)
        for part, result in found.items():
            bound = max(BOUNDS[dtype], FACTOR * _error(rounded[part], expected[part]))
            off = _error(result, expected[part])
            if not off <= bound:  # also NaN
                shapes = [tuple(x.shape) for x in exact if isinstance(x, Tensor)]
                return f'{part} is off by {off:.1e}, at most {bound:.1e}, for shapes {shapes}'
    return None


def _cast(op: Op, args: Args, dtype: torch.dtype) -> Args:
    """Tokens in a dtype, other tensors in that of states."""
    state = torch.float64 if dtype == torch.float64 else torch.float32
    return tuple(
        x.to(dtype if name in op.tokens else state)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in zip(op.names, args, strict=True)
    )


def _results(op: Op, module: Any, args: Args) -> dict[str, Tensor]:
    """Results and gradients by name, for gradients of the results that are the same everywhere."""
    out = op.run(module, args, True)
    results = [x for x in out[: op.results] if x.numel()]
    seeds = Examples()
    grads: list[Tensor | None] = [seeds.normal(*x.shape).to(x) for x in results]
    grads = [*grads, *[None] * (op.results - len(grads))]
    needs = [args[i] is not None and args[i].is_floating_point() for i in op.tensors]
    kept = out[op.results :] + (out[:1] if op.saves_output else ())
    found = op.run_backward(module, grads, args, kept, needs)
    named = {f'result {i}': x for i, x in enumerate(results)}
    for i, x in zip(op.tensors, found, strict=True):
        if x is not None:
            named[f'the gradient of {op.names[i]}'] = x
    return named


def _error(x: Tensor, exact: Tensor) -> float:
    x, exact = x.double().cpu(), exact.double().cpu()
    return ((x - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()


# ------------------------------------------------------------------------------------- verdicts


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
    """The user's cache."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'ttt_kernels'


def verdicts() -> Iterator[dict[str, Any]]:
    """All verdicts in the cache: a fingerprint with `reason` (None if it passed) and `time`."""
    for path in sorted(folder().glob('*.json')):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(path.read_text())


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lets one process of a machine pass at a time; all, where files cannot be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open('w'))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def reason(op: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why an op's kernel must not run on a GPU of which nothing is known, or None."""
    if os.environ.get(VARIABLE) == '0':
        return None
    key = fingerprint(op, dtype, device)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    path = folder() / f'{name}.json'
    with _alone(path.with_suffix('.lock')):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return json.loads(path.read_text())['reason']
        print(
            f'ttt_kernels: {op} meets {key["gpu"]} in {key["dtype"]} for the first time; its '
            f'kernel is compared with the reference ({VARIABLE}=0 leaves this out)',
            file=sys.stderr,
        )
        found, certain = _run(op, dtype, device)
        if certain:
            with contextlib.suppress(OSError):  # then once a process
                text = json.dumps({**key, 'reason': found, 'time': time.time()}, indent=1)
                partial = path.with_suffix(f'.{os.getpid()}')
                partial.write_text(text)
                partial.replace(path)
    return found


def command(op: str, dtype: torch.dtype, device: torch.device) -> list[str]:
    """The process that makes a check."""
    return [sys.executable, *_module(op, dtype), '--device', str(device)]


def _module(op: str, dtype: torch.dtype) -> list[str]:
    name = next(n for n, x in _known.DTYPES.items() if x == dtype)
    return ['-m', 'ttt_kernels', 'check', op, '--dtype', name]


def _run(op: str, dtype: torch.dtype, device: torch.device) -> tuple[str | None, bool]:
    """Why the kernel must not run, or None; and whether that will be so the next time."""
    call = command(op, dtype, device)
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path)), VARIABLE: '0'}
    process = subprocess.Popen(
        call,
        env=env,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        why = f'took more than {LIMIT:.0f} s'
    else:
        said = output.strip().splitlines()[-1:] or ['it said nothing']
        if process.returncode == PASSED:
            return None, True
        if process.returncode == NOT_CHECKED:
            return f'its check could not run: {said[0]}', False
        why = f'failed: {said[0]}'
        if process.returncode != FAILED:
            why = f'crashed (exit status {process.returncode}): {said[0]}'
    how = ' '.join(['python', *_module(op, dtype)])
    return f'its check {why}; please report this with the output of `{how}`', True


def main(op: str, dtypes: list[str], device: str) -> int:
    """`python -m ttt_kernels check`: prints what differs; 0 if nothing, 1 if something."""
    from ._backend import interpreting

    target = torch.device('cpu' if interpreting() else device)
    status = PASSED
    try:
        torch.zeros(1, device=target)
    except Exception as error:  # in use by somebody else
        print(f'{target}: {type(error).__name__}: {error}'.splitlines()[0])
        return NOT_CHECKED
    for name in dtypes:
        try:
            found = compare(op, _known.DTYPES[name], target)
        except Exception as error:  # of the compiler, of the GPU
            print(f'{op} {name}: {type(error).__name__}: {error}'.splitlines()[0])
            return NOT_CHECKED if isinstance(error, torch.OutOfMemoryError) else FAILED
        print(f'{op} {name}: {found or "agrees with the reference"}')
        status = max(status, FAILED if found else PASSED)
    return status
