"""A kernel checks itself: the compiled kernels of a call, before the first one of each.

A process of its own compares some images of the call's layout with the reference (`_compare`),
because an illegal access ends the process that makes it. The user's cache keeps what was computed:
that the kernels agree, or by how much they differ, which leaves their calls to the reference.
Anything else, such as a time-out or a full disk, holds for this process only.
"""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

VARIABLE = 'TTT_KERNELS_CHECK'
AGREES, DIFFERS = 'agrees', 'differs'
# Seconds for a check; on an idle machine it takes some 30, most of them for compiling.
LIMIT = 600.0
# Seconds of waiting for another process after which it is said.
PATIENCE = 5.0
# Images of a check, and tokens of all of them, unless one image has more.
MOST_IMAGES, MOST_TOKENS = 3, 1 << 14
_FOLDER = Path(__file__).parent
# Looks for no module in the working directory, and finds this package where this process has it.
_CHILD = """
import importlib.util, sys
sys.path += [x for x in {paths!r} if x not in sys.path]
spec = importlib.util.spec_from_file_location('ttt_kernels', {init!r})
sys.modules['ttt_kernels'] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from ttt_kernels import _compare
_compare.answer()
"""


@functools.cache
def sources(op: str) -> str:
    """Digest of the op's files and of those that the ops share."""
    digest = hashlib.sha256()
    for path in (*sorted(_FOLDER.glob('*.py')), *sorted((_FOLDER / op).glob('*.py'))):
        if not path.name.startswith('_numba'):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def fingerprint(op: str, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """All that a verdict depends on, besides the launches."""
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
        'sources': sources(op),
    }


# ---------------------------------------------------------------------------------------- launches


def some_images(op: Any, args: Any) -> Any:
    """The arguments of a call, views of its first images."""
    tokens = max(1, args[0].shape[1])
    few = max(1, min(len(args[0]), MOST_IMAGES, MOST_TOKENS // tokens))
    return args._replace(**{n: getattr(args, n)[:few] for n in op.images})


def launches(op: Any, kernel: ModuleType, args: tuple, batch: int) -> str:
    """Digest of all launches of a call with some images, as of a call with the whole batch."""
    from . import _launch

    needs = [args[i] is not None and args[i].is_floating_point() for i in op.tensors]
    with torch.no_grad(), _launch.planned_for(batch, len(args[0])), _launch.recorded() as record:
        for keep in (False, True)[not op.keeps :]:
            out = op.run(kernel, args, keep)
        grads = [torch.empty_like(x) if x.numel() else None for x in out[: op.results]]
        op.run_backward(kernel, grads, args, out[op.results :], needs)
    # Classes of lengths, and whether a dimension is more than one: a kernel may take other ways.
    length = -(-(args[0].shape[1] - 1).bit_length() // 2)
    several = [n > 1 for n in args[0].shape]
    return hashlib.sha256(repr((length, several, sorted(record))).encode()).hexdigest()[:24]


def layout(x: Any) -> Any:
    """An argument for JSON: the layout of a tensor, or the value of an option."""
    if not isinstance(x, Tensor):
        return x
    dtype, offset = str(x.dtype).removeprefix('torch.'), x.data_ptr() % 16 // x.element_size()
    return {'shape': [*x.shape], 'stride': [*x.stride()], 'dtype': dtype, 'offset': offset}


# ---------------------------------------------------------------------------------------- verdicts


def folder() -> Path:
    """The user's cache. Without a home directory it cannot be written."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return Path(os.devnull if cache.startswith('~') else cache) / 'ttt_kernels'


def _read(path: Path) -> dict[str, Any] | None:
    """A kept verdict, or None for anything else."""
    try:
        kept = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    names = ('op', 'dtype', 'gpu', 'triton', 'sources', 'verdict')
    if not isinstance(kept, dict) or not all(isinstance(kept.get(n), str) for n in names):
        return None
    known = kept['verdict'] == AGREES or DIFFERS in kept['verdict'].split()
    return kept if known and isinstance(kept.get('time'), float) else None


def verdicts() -> Iterator[tuple[Path, dict[str, Any]]]:
    """All verdicts in the cache, and their files."""
    for path in sorted(folder().glob('*.json')):
        if (kept := _read(path)) is not None:
            yield path, kept


def _path(key: dict[str, str]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return folder() / f'{name}.json'


def _keep(key: dict[str, str], verdict: str, request: dict[str, Any]) -> None:
    kept = {**key, 'verdict': verdict, 'request': request, 'time': time.time()}
    with contextlib.suppress(OSError):
        # A file of a new name: another process may read the old one, and a link leads elsewhere.
        with tempfile.NamedTemporaryFile('w', dir=folder(), suffix='.part', delete=False) as file:
            json.dump(kept, file, indent=1)
        os.replace(file.name, _path(key))


_REASONS: dict[str, str | None] = {}
_MOST_REASONS = 1024


def reason(op: Any, kernel: ModuleType, args: tuple) -> str | None:
    """Why the kernels of a call must not run, or None."""
    q = args[0]
    if os.environ.get(VARIABLE) == '0' or q.numel() == 0:
        return None
    few = some_images(op, args)
    key = fingerprint(op.name, q.dtype, q.device)
    key['launches'] = launches(op, kernel, few, len(q))
    path = _path(key)
    if path.name not in _REASONS:
        request = {
            'op': op.name,
            'device': str(q.device),
            'batch': len(q),
            'args': [*map(layout, few)],
        }
        if len(_REASONS) >= _MOST_REASONS:
            _REASONS.clear()
        _REASONS[path.name] = _first_reason(path, key, request)
    return _REASONS[path.name]


def _first_reason(path: Path, key: dict[str, str], request: dict[str, Any]) -> str | None:
    """The reason by a kept verdict, or by a new one. One process of a machine makes it."""
    lock = FileLock(path.with_suffix('.lock'), fallback_to_soft=False)
    with contextlib.suppress(OSError):  # a disk without locks: each process for itself
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(PATIENCE)
        except Timeout:
            print(f'ttt_kernels: waits for the check of {key["op"]} by another', file=sys.stderr)
            lock.acquire()
    try:
        kept = _read(path)
        if kept is None or not key.items() <= kept.items():
            print(
                f'ttt_kernels: a new kind of {key["op"]} in {key["dtype"]} on {key["gpu"]}; its '
                f'kernels are compared with the reference ({VARIABLE}=0 leaves this out)',
                file=sys.stderr,
            )
            verdict, why = ask(key, request)
            if verdict is None:
                return f'its check could not run: {why}'
            _keep(key, verdict, request)
        else:
            verdict = kept['verdict']
    finally:
        lock.release()
    if verdict == AGREES:
        return None
    return f'{verdict}; please report this with {path}'


def command() -> list[str]:
    """The process that makes a check."""
    here = os.getcwd()
    paths = [x for x in sys.path if x and os.path.abspath(x) != here]
    code = _CHILD.format(paths=paths, init=str(_FOLDER / '__init__.py'))
    return [sys.executable, '-I', '-c', code]


def ask(key: dict[str, str], request: dict[str, Any]) -> tuple[str | None, str]:
    """The verdict of a new process, or None without one, and why."""
    # Only an answer to this question counts, not an exit status.
    nonce = secrets.token_hex(16)
    try:
        done = subprocess.run(
            command(),
            input=json.dumps({**request, 'nonce': nonce}),
            env={**os.environ, VARIABLE: '0'},
            cwd=_FOLDER,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return None, f'it took more than {LIMIT:.0f} s'
    except OSError as error:
        return None, str(error)
    lines = done.stdout.strip().splitlines()
    for line in lines:
        if line.startswith(f'{nonce} '):
            _, checked, verdict = line.split(' ', 2)
            if checked == key['launches']:
                return verdict, ''
            return None, 'its launches are others than those of the call'
    said = lines[-1] if lines else 'it said nothing'
    return None, f'exit status {done.returncode}: {said}'
