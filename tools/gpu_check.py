"""`make gpu`: the tests of the kernels on this machine's GPU, their benchmarks, models.

    python tools/gpu_check.py --out DIR                     # all, in some 40 minutes
    python tools/gpu_check.py --out DIR --part sanitizer    # needs compute-sanitizer
    python tools/gpu_check.py --out DIR --part tests        # each in less than 10
    python tools/gpu_check.py --out DIR --part benchmarks
    python tools/gpu_check.py --out DIR --part output
    python tools/gpu_check.py --out DIR --part models

Everything goes to DIR: tables that name the GPU and the versions, plots, and a full log. First,
compute-sanitizer checks the backward passes of ttt_glu and ttt_mlp, whose tiles of 32 tokens at
four warps are reported to be miscompiled by ptxas 12.8 (fla 807, 1262; FlagGems 6075), also with
ptxas 13.3 or newer if there is one (in the wheel nvidia-cuda-nvcc). After the tests it names the
rows of kernels/_known.py that they settle.

A step that runs out of time gets SIGTERM, and writes and draws its measurements so far; so does the
current step if this program is ended. The exit status is 1 if a test fails or a row is missing.
Needs torch and Triton; optionally pytest for the tests, matplotlib for the plots,
flash-linear-attention for a comparison; mmengine, timm and rich for the models. mmvttt need not be
installed: it and `ttt_kernels` are imported from this repository.
"""

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / 'tools' / 'dev' / 'kernel_benchmarks'
# Seconds to finish a running step: the slowest contender takes about half a minute.
GRACE = 40
# Seconds after SIGTERM to write tables and plots.
LAST_WORDS = 20
# Imports of a part's steps, besides torch and Triton.
NEEDS = {
    'sanitizer': ('pytest',),
    'tests': ('pytest',),
    'models': ('mmengine', 'timm', 'rich', 'matplotlib'),
}
# Plain backbones with DeiT (fused attention), hierarchical ones with Swin and ConvNeXt.
MODELS = (
    'vittt_tiny_patch16_224',
    'vit3_tiny_patch16_224',
    't5_tiny_patch16_224',
    'deit_tiny_patch16_224',
    'h_vit3_tiny',
    'swin_tiny_patch4_window7_224',
    'convnext_tiny',
)


class Step(NamedTuple):
    part: str
    title: str
    command: tuple[str, ...]  # options of Python
    seconds: int  # for the whole step
    under: tuple[str, ...] = ()  # a program that runs Python
    env: tuple[tuple[str, str], ...] = ()


def sanitized() -> Iterator[Step]:
    """The backward passes of ttt_glu and ttt_mlp under compute-sanitizer, by assembler."""
    program = shutil.which('compute-sanitizer')
    if program is None:
        return
    under = (program, '--tool', 'memcheck', '--error-exitcode', '1')
    which = 'agree_with_fp64 and (ttt_glu or ttt_mlp) and bfloat16'
    tests = str(ROOT / 'tests' / 'kernels' / 'test_ops_gpu.py')
    command = ('-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', 'gpu', tests, '-k', which)
    # In torch's cached blocks an access behind a tensor is legal.
    env = (('PYTORCH_NO_CUDA_MEMORY_CACHING', '1'),)
    yield Step('sanitizer', "compute-sanitizer, Triton's ptxas", command, 290, under, env)
    if ptxas := newer_ptxas():
        names = ('TRITON_PTXAS_PATH', 'TRITON_PTXAS_BLACKWELL_PATH')
        env += tuple((name, ptxas) for name in names)
        yield Step('sanitizer', f'compute-sanitizer, {ptxas}', command, 290, under, env)


def newer_ptxas() -> str | None:
    """A ptxas of version 13.3 or newer on this machine."""
    found = [os.environ.get('TRITON_PTXAS_PATH'), shutil.which('ptxas')]
    found.append('/usr/local/cuda/bin/ptxas')
    wheels = importlib.util.find_spec('nvidia')
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        found += map(str, Path(folder).glob('*/bin/ptxas'))
    for path in found:
        if path and os.access(path, os.X_OK):
            said = subprocess.run([path, '--version'], capture_output=True, text=True).stdout
            version = re.search(r'release (\d+)\.(\d+)', said)
            if version and tuple(map(int, version.groups())) >= (13, 3):
                return path
    return None


def settled(report: Path) -> Iterator[str]:
    """One line for each op and dtype that the tests in a JUnit report compared with fp64."""
    spec = importlib.util.spec_from_file_location('known', ROOT / 'kernels' / '_known.py')
    known = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(known)
    import triton

    gpu = known.gpu_of(torch.cuda.get_device_capability())
    passed: dict[tuple[str, str], list[bool]] = {}
    for case in ElementTree.parse(report).iter('testcase'):
        name = re.fullmatch(r'test_\w+_agree_with_fp64\[(\w+).*-torch\.(\w+)\]', case.get('name'))
        if name and case.find('skipped') is None:
            good = case.find('failure') is None and case.find('error') is None
            passed.setdefault(name.groups(), []).append(good)
    for (op, name), results in sorted(passed.items()):
        dtype = next(n for n, x in known.DTYPES.items() if str(x) == f'torch.{name}')
        count = f'{sum(results)} of {len(results)} cases agree with fp64'
        verdict = known.RUNS if all(results) else f'{known.REFUSED}, if that is a wrong result'
        yield f'settled: {gpu}, Triton {triton.__version__}, {op}, {dtype}: {verdict} ({count})'


def steps(out: Path, smoke: bool, report: Path) -> list[Step]:
    """Each part stays below ten minutes; the most important figures come first."""
    tests = (ROOT / 'tests' / 'kernels').glob('test_*_gpu.py')
    tests = sorted(map(str, tests), key=lambda path: ('ttt_linear' not in path, path))
    pytest = ('-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', 'gpu', *tests)
    pytest += (f'--junitxml={report}',)
    # Most of the time is compilation of some 300 variants of the kernels.
    if importlib.util.find_spec('xdist') and (os.cpu_count() or 1) >= 8:
        pytest += ('-n', '4')
    # On a CPU there is no time limit.
    slower = 20 if smoke else 1
    found = [*sanitized(), Step('tests', 'tests', pytest, 540 * slower)]
    for name, seconds in (
        ('ttt_linear', 190),
        ('causal_conv', 60),
        ('ttt_glu', 110),
        ('deform_attn', 100),
    ):
        seconds *= slower
        script = str(BENCHMARKS / f'{name}.py')
        options = ('--out', str(out), '--seconds', str(seconds - GRACE))
        options += ('--smoke',) if smoke else ()
        found.append(Step('benchmarks', f'benchmark {name}', (script, *options), seconds))
    found += [models(out, smoke, *case, slower) for case in MODEL_CASES[:: 2 if smoke else 1]]
    outputs = (str(BENCHMARKS / 'ttt_linear.py'), '--output')
    outputs += ('--smoke',) if smoke else ()
    return [*found, Step('output', 'output of ttt_linear', outputs, 120 * slower)]


# Name, options and seconds of the steps with models.
SIZES = ('--batch', '8', '--sizes', '224', '384', '512', '768', '1024', '1280')
DETECTION = ('--batch', '2', '--shape', '800', '1333')
MODEL_CASES = (
    ('inference', (*SIZES, '--cuda-graph'), 190),
    ('detection', (*DETECTION, '--cuda-graph'), 80),
    ('training', (*SIZES, '--train'), 190),
    ('detection_training', (*DETECTION, '--train'), 80),
)


def models(
    out: Path, smoke: bool, name: str, options: tuple[str, ...], seconds: int, slower: int
) -> Step:
    """Latency and memory of whole models in mixed precision."""
    seconds *= slower
    path = out / f'models_{name}'
    command = (
        str(ROOT / 'tools' / 'benchmark.py'),
        *(MODELS[1:4:2] if smoke else MODELS),
        *options,
    )
    command += ('--device', 'cuda', '--dtype', 'bfloat16', '--keep-going')
    command += ('--seconds', str(seconds - GRACE))
    command += ('--out', f'{path}.csv', '--plot', f'{path}.png')
    if smoke:
        command += ('--sizes', '64', '--shape', '64', '64', '--repeats', '1', '--warmup', '0')
    return Step('models', f'models, {name}', command, seconds)


def environment(folder: Path) -> dict[str, str]:
    """Environment variables with which `import ttt_kernels` finds this repository's kernels."""
    env = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    (folder / 'ttt_kernels').symlink_to(ROOT / 'kernels', target_is_directory=True)
    paths = (str(folder), env.get('PYTHONPATH'), str(ROOT))
    env['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
    env['PYTHONUNBUFFERED'] = '1'
    return env


def say(line: str, log: TextIO) -> None:
    print(line, flush=True)
    log.write(line + '\n')
    log.flush()


def listen(process: subprocess.Popen[str], log: TextIO) -> int:
    """Forwards the output of a process until it ends; returns its exit status."""
    for line in process.stdout:
        say(line.rstrip('\n'), log)
    return process.wait()


def run(step: Step, env: dict[str, str], log: TextIO) -> bool:
    """Runs a step with its output on the screen and in the log; whether it succeeds in time."""
    say(f'== {step.title}', log)
    start = time.monotonic()
    process = subprocess.Popen(
        [*step.under, sys.executable, *step.command],
        cwd=ROOT,
        env=env | dict(step.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # pytest prints its summary after an interrupt, but not after SIGTERM.
    end = signal.SIGINT if step.part in ('tests', 'sanitizer') else signal.SIGTERM
    timers = [
        threading.Timer(step.seconds, process.send_signal, (end,)),
        threading.Timer(step.seconds + LAST_WORDS, process.kill),
    ]
    for timer in timers:
        timer.start()
    try:
        code = listen(process, log)
    except KeyboardInterrupt:
        process.send_signal(end)
        threading.Timer(LAST_WORDS, process.kill).start()
        listen(process, log)
        say(f'== {step.title}: interrupted', log)
        raise
    finally:
        for timer in timers:
            timer.cancel()
    took = time.monotonic() - start
    result = 'ok' if code == 0 else 'out of time' if took >= step.seconds else f'failed ({code})'
    say(f'== {step.title}: {result} after {took:.0f} s', log)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'benchmarks')
    parser.add_argument(
        '--part',
        choices=('sanitizer', 'tests', 'benchmarks', 'output', 'models'),
        help='run this part only',
    )
    parser.add_argument('--smoke', action='store_true', help='tiny shapes: does it run at all?')
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f'torch {torch.__version__} sees no CUDA GPU here. `make gpu` tests and times the '
            'kernels on one; `make test` tests them without.'
        )
        return 1
    # Lets the current step report what it has measured.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    passed = True
    name = f'gpu_check_{args.part}.log' if args.part else 'gpu_check.log'
    with tempfile.TemporaryDirectory() as folder, (out / name).open('w') as log:
        say(f'{torch.cuda.get_device_name()}, torch {torch.__version__}', log)
        env = environment(Path(folder))
        report = Path(folder) / 'tests.xml'
        if not shutil.which('compute-sanitizer') and args.part in (None, 'sanitizer'):
            say('== compute-sanitizer: not on the PATH (it is in the CUDA toolkit)', log)
        for step in steps(out, args.smoke, report):
            if args.part not in (None, step.part):
                continue
            missing = [n for n in NEEDS.get(step.part, ()) if not importlib.util.find_spec(n)]
            if missing:
                names = ' '.join(missing)
                say(f'== {step.title}: not run, without {names} (pip install {names}): failed', log)
                passed = False
                continue
            passed = run(step, env, log) and passed
            if step.part == 'tests' and report.exists():
                for line in settled(report):
                    say(line, log)
    return int(not passed)


if __name__ == '__main__':
    sys.exit(main())
