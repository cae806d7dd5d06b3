"""`make gpu`: whole models and ops on this machine's GPU against the CPU, then their times.

    python tools/dev/gpu_check.py --out DIR [--part models|ops|times|sanitizer]

Without --part these are all but the sanitizer, in ten minutes or so. Whole models come first:
outputs and gradients, then the tests of the ops, then wall, GPU and host time.
Results are in DIR as soon as a step ends: `gpu_check.log`, and tables that name the GPU and the
versions. A step that runs out of time is interrupted and reports what it has.

The exit status is 1 if something failed. Needs torch, Triton, timm and pytest. mmvttt need not be
installed: it and `ttt_kernels` are imported from this repository.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch

ROOT = Path(__file__).resolve().parents[2]
# Files with the tests of a part, and seconds that they may take.
TESTS = {
    'models': (
        ('tests/numbers/test_models.py', 'tests/models/test_*.py', 'tests/deploy/test_*.py'),
        150,
    ),
    'ops': (('tests/kernels/test_*.py', 'tests/numbers/test_ops.py'), 220),
}
# Not all systems say which cores the process may use.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
# Processes that test side by side: each compiles kernels on one core.
PROCESSES = max(2, min(12, CORES))
# Seconds in which an interrupted process reports.
GRACE = 15
PYTEST = ('-m', 'pytest', '-p', 'no:cacheprovider', '-m', 'gpu')
MODELS = (
    'vittt_small_patch16_224',
    'vit3_small_patch16_224',
    't5_small_patch16_224',
    'deit_small_patch16_224',
    'h_vit3_tiny',
    'swin_tiny_patch4_window7_224',
)
CASES = ('128x224x224', '16x800x1344')
BENCHMARK, HOST = 'tools/benchmark.py', 'tools/dev/host_time.py'


class Check:
    """Runs steps, forwards their output to the screen and to a log, and counts failures."""

    def __init__(self, out: Path, log: TextIO, env: dict[str, str]) -> None:
        self.out, self.log, self.env = out, log, env
        self.failed: list[str] = []
        self.lock = threading.Lock()

    def say(self, line: str) -> None:
        with self.lock:
            print(line, flush=True)
            self.log.write(line + '\n')
            self.log.flush()

    def run(
        self,
        title: str,
        commands: Sequence[Sequence[str]],
        seconds: float,
        under: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """Runs Python with each of the commands side by side, with environment variables."""
        self.say(f'== {title}')
        start = time.monotonic()
        limit = ('timeout', '--foreground', '--signal=INT', f'--kill-after={GRACE}', f'{seconds}')
        processes = [
            subprocess.Popen(
                [*limit, *under, sys.executable, *command],
                cwd=ROOT,
                env={**self.env, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command in commands
        ]
        readers = [threading.Thread(target=self._forward, args=(p.stdout,)) for p in processes]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        wrong = [code for code in (p.wait() for p in processes) if code]
        result = 'ok' if not wrong else 'out of time' if 124 in wrong else f'failed {wrong}'
        self.say(f'== {title}: {result} after {time.monotonic() - start:.0f} s')
        if wrong:
            self.failed.append(title)

    def _forward(self, output: TextIO) -> None:
        for line in output:
            self.say(line.rstrip('\n'))

    def tests(self, part: str) -> None:
        """The tests of a part that are marked `gpu`, in several processes."""
        seconds = TESTS[part][1]
        done = subprocess.run(
            [sys.executable, *PYTEST, '--collect-only', *map(str, files(part))],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
        )
        names = [line for line in done.stdout.splitlines() if line.startswith('tests/')]
        if not names:
            self.say(done.stdout[-3000:] + done.stderr[-3000:])
            self.failed.append(f'{part}: no tests')
            return
        shares = share(names)
        title = f'{part}: {len(names)} tests in {len(shares)} processes'
        # By default each process would compute its references with a thread for each core.
        threads = str(max(1, CORES // len(shares)))
        commands = [(*PYTEST, *names) for names in shares]
        self.run(title, commands, seconds, OMP_NUM_THREADS=threads)

    def sanitizer(self) -> None:
        """The backward passes of ttt_glu and ttt_mlp, which ptxas 12.8 is known to miscompile."""
        program = shutil.which('compute-sanitizer')
        if program is None:
            self.say('== compute-sanitizer: not on the PATH (it is in the CUDA toolkit)')
            return
        under = (program, '--tool', 'memcheck', '--error-exitcode', '1')
        which = 'agree_with_fp64 and (ttt_glu or ttt_mlp) and bfloat16'
        command = (*PYTEST, 'tests/kernels/test_ops_gpu.py', '-k', which)
        # In torch's cached blocks an access behind a tensor is legal.
        self.run('compute-sanitizer', [command], 290, under, PYTORCH_NO_CUDA_MEMORY_CACHING='1')

    def times(self) -> None:
        """Wall and GPU time of inference and of training steps, and the host's time."""
        general = ('--dtype', 'bfloat16', '--device', 'cuda')
        once = (*general, '--batch', '2', '--train', '--repeats', '1')
        warm = [(BENCHMARK, n, *once, '--out', f'{self.out}/warm_{n}.csv') for n in MODELS]
        self.run('compilation of the models, side by side', warm, 90)
        for case in CASES:
            batch, *sides = case.split('x')
            options = (*general, '--batch', batch, '--shape', *sides, '--cuda-graph')
            command = (BENCHMARK, *MODELS, *options, '--out', f'{self.out}/inference_{case}.csv')
            self.run(f'inference, {case}', [command], 60)
            command = (HOST, '--only', 'steps', '--size', case, '--out', f'{self.out}/{case}.csv')
            self.run(f'training steps, {case}', [command], 60)
        self.run('ops', [(HOST, '--only', 'ops', '--out', f'{self.out}/ops.csv')], 40)


def files(part: str) -> list[Path]:
    """Files with tests for a GPU."""
    paths = [path for pattern in TESTS[part][0] for path in sorted(ROOT.glob(pattern))]
    return [path for path in paths if 'pytest.mark.gpu' in path.read_text(encoding='utf-8')]


def share(names: Sequence[str]) -> list[list[str]]:
    """Test names for each process. What compiles the same kernels stays together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        file, _, rest = name.partition('::')
        function, _, parameters = rest.partition('[')
        key = re.match(r'[a-zA-Z]+_\w+', parameters)
        groups[f'{file} {key[0] if key else function}'].append(name)
    shares: list[list[str]] = [[] for _ in range(PROCESSES)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [part for part in shares if part]


def environment(folder: Path) -> dict[str, str]:
    """Environment variables with which `import ttt_kernels` finds this repository's kernels."""
    env = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    (folder / 'ttt_kernels').symlink_to(ROOT / 'kernels', target_is_directory=True)
    paths = (str(folder), env.get('PYTHONPATH'), str(ROOT))
    # The tests run the kernels themselves, so that no process waits for another's self-check.
    env |= {'TTT_KERNELS_CHECK': '0', 'PYTHONUNBUFFERED': '1'}
    return env | {'PYTHONPATH': os.pathsep.join(filter(None, paths))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, default=ROOT / 'work_dirs' / 'gpu_check')
    parser.add_argument('--part', choices=(*TESTS, 'times', 'sanitizer'), help='only this part')
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f'torch {torch.__version__} sees no CUDA GPU here. `make gpu` tests and times the '
            'kernels on one; `make test` tests them without.'
        )
        return 1
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, (out / 'gpu_check.log').open('a') as log:
        check = Check(out, log, environment(Path(folder)))
        versions = f'torch {torch.__version__}, CUDA {torch.version.cuda}'
        check.say(f'{torch.cuda.get_device_name()}, {versions}')
        for part in TESTS:
            if args.part in (None, part):
                check.tests(part)
        if args.part in (None, 'times'):
            check.times()
        if args.part == 'sanitizer':
            check.sanitizer()
        check.say(f'== failed: {", ".join(check.failed) or "nothing"}')
    return int(bool(check.failed))


if __name__ == '__main__':
    sys.exit(main())
