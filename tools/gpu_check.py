"""`make gpu`: the tests of the kernels on this machine's GPU, then their benchmarks and plan.

    python tools/gpu_check.py --out DIR                     # all, in some 20 minutes
    python tools/gpu_check.py --out DIR --part tests        # each in less than 10
    python tools/gpu_check.py --out DIR --part benchmarks
    python tools/gpu_check.py --out DIR --part plan

Everything goes to DIR: tables that name the GPU and the versions, plots, a log of the whole, and
the measured plan of ttt_linear, which takes effect as kernels/ttt_linear/_plans.py.
The exit status is 1 where a test fails or a row is missing. Needs torch and Triton; pytest for the
tests, matplotlib for the plots, flash-linear-attention for a comparison with it, where they are
there. Nothing has to be installed: `ttt_kernels` is found in the folder kernels/.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / 'tools' / 'dev' / 'kernel_benchmarks'
# A step that has begun is finished: the slowest contender takes about half a minute.
GRACE = 40


class Step(NamedTuple):
    part: str
    title: str
    command: tuple[str, ...]
    seconds: int  # for all of it


def steps(out: Path, smoke: bool) -> list[Step]:
    """Each part stays below ten minutes; the figures that are waited for most come first."""
    tests = (ROOT / 'tests' / 'kernels').glob('test_*_gpu.py')
    tests = sorted(map(str, tests), key=lambda path: ('ttt_linear' not in path, path))
    pytest = ('-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', 'gpu', *tests)
    # Most of the time goes into compiling some 300 variants of the kernels.
    if importlib.util.find_spec('xdist') and (os.cpu_count() or 1) >= 8:
        pytest += ('-n', '4')
    # A rehearsal has all the time that a busy CPU needs.
    slower = 20 if smoke else 1
    found = [Step('tests', 'tests', pytest, 540 * slower)]
    for name, seconds in (
        ('ttt_linear', 205),
        ('causal_conv', 75),
        ('ttt_glu', 120),
        ('deform_attn', 110),
        ('predict', 85),
    ):
        seconds *= slower
        script = str(BENCHMARKS / f'{name}.py')
        options = ('--calibrate',) if name == 'predict' else ()
        options += ('--out', str(out), '--seconds', str(seconds - GRACE))
        options += ('--smoke',) if smoke else ()
        found.append(Step('benchmarks', f'benchmark {name}', (script, *options), seconds))
    tune = (str(BENCHMARKS / 'ttt_linear.py'), '--tune', '--out', str(out))
    tune += ('--smoke',) if smoke else ()
    return [*found, Step('plan', 'plan of ttt_linear', tune, 120 * slower)]


def environment(folder: Path) -> dict[str, str]:
    """Variables under which `import ttt_kernels` finds this repository's kernels."""
    env = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    (folder / 'ttt_kernels').symlink_to(ROOT / 'kernels', target_is_directory=True)
    env['PYTHONPATH'] = os.pathsep.join(filter(None, (str(folder), env.get('PYTHONPATH'))))
    env['PYTHONUNBUFFERED'] = '1'
    return env


def say(line: str, log: TextIO) -> None:
    print(line, flush=True)
    log.write(line + '\n')
    log.flush()


def run(step: Step, env: dict[str, str], log: TextIO) -> bool:
    """Whether a step succeeds within its time; its output goes to the screen and to the log."""
    say(f'== {step.title}', log)
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *step.command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(step.seconds, process.kill)
    timer.start()
    for line in process.stdout:
        say(line.rstrip('\n'), log)
    code = process.wait()
    timer.cancel()
    took = time.monotonic() - start
    result = 'ok' if code == 0 else 'out of time' if took >= step.seconds else f'failed ({code})'
    say(f'== {step.title}: {result} after {took:.0f} s', log)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'benchmarks')
    parser.add_argument(
        '--part', choices=('tests', 'benchmarks', 'plan'), help='run this part only'
    )
    parser.add_argument('--smoke', action='store_true', help='tiny shapes: does it run at all?')
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f'torch {torch.__version__} sees no CUDA GPU here. `make gpu` tests and times the '
            'kernels on one; `make test` tests them without.'
        )
        return 1
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    passed = True
    name = f'gpu_check_{args.part}.log' if args.part else 'gpu_check.log'
    with tempfile.TemporaryDirectory() as folder, (out / name).open('w') as log:
        say(f'{torch.cuda.get_device_name()}, torch {torch.__version__}', log)
        env = environment(Path(folder))
        for step in steps(out, args.smoke):
            if args.part not in (None, step.part):
                continue
            if step.part == 'tests' and not importlib.util.find_spec('pytest'):
                say('== tests: not run, pytest is missing (pip install pytest): failed', log)
                passed = False
                continue
            passed = run(step, env, log) and passed
    return int(not passed)


if __name__ == '__main__':
    sys.exit(main())
