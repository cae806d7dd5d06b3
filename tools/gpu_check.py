"""`make gpu`: the tests of the kernels on this machine's GPU, then the benchmarks, in 8 minutes.

Needs torch and Triton; pytest for the tests, matplotlib for the plots, flash-linear-attention for a
comparison with it, where they are there. Nothing has to be installed: `ttt_kernels` is found in
the folder kernels/.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 480  # seconds
BENCHMARKS = ('ttt_linear', 'ttt_glu')


def environment(folder: Path) -> dict[str, str]:
    """Variables under which `import ttt_kernels` finds this repository's kernels."""
    env = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    (folder / 'ttt_kernels').symlink_to(ROOT / 'kernels', target_is_directory=True)
    env['PYTHONPATH'] = os.pathsep.join(filter(None, (str(folder), env.get('PYTHONPATH'))))
    return env


def run(title: str, command: list[str], env: dict[str, str], seconds: float) -> bool:
    """Whether a command succeeds within its time."""
    print(f'== {title}', flush=True)
    start = time.monotonic()
    try:
        code = subprocess.run(command, cwd=ROOT, env=env, timeout=max(seconds, 1)).returncode
    except subprocess.TimeoutExpired:
        code = 'out of time'
    print(f'== {title}: {code or "ok"} after {time.monotonic() - start:.0f} s', flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'benchmarks')
    args = parser.parse_args()
    end = time.monotonic() + LIMIT
    if not torch.cuda.is_available():
        print(
            f'torch {torch.__version__} sees no CUDA GPU here. `make gpu` tests and times the '
            'kernels on one; `make test` tests them without.'
        )
        return 1
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}')
    with tempfile.TemporaryDirectory() as folder:
        env = environment(Path(folder))
        passed = True
        tests = sorted(str(path) for path in (ROOT / 'tests' / 'kernels').glob('test_*_gpu.py'))
        if importlib.util.find_spec('pytest'):
            command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *tests]
            passed = run('tests', command, env, 0.45 * LIMIT)
        else:
            print('== tests: not run, pytest is missing (pip install pytest); the check has failed')
            passed = False
        for i, name in enumerate(BENCHMARKS):
            seconds = (end - time.monotonic()) / (len(BENCHMARKS) - i)
            benchmark = str(ROOT / 'tools' / 'kernel_benchmarks' / f'{name}.py')
            command = [sys.executable, benchmark, '--out', str(args.out)]
            # What has begun is finished: the slowest contender takes some half a minute.
            command += ['--seconds', str(max(int(seconds - 40), 20))]
            passed = run(f'benchmark {name}', command, env, seconds) and passed
    return int(not passed)


if __name__ == '__main__':
    sys.exit(main())
