"""Time that the host needs for a call of each op on a GPU; no GPU need be there.

    python tools/dev/kernel_benchmarks/host.py --before ../other_checkout --out work_dirs

Everything runs up to the launch, which is not made: checks, dispatcher, autograd, plans, Triton's
binder; outputs are allocated in host memory, and the few operations of torch around the kernels run
there, on small tensors. Two checkouts, --before and this one, take turns in processes of their own;
of each the quickest runs count, in processor time of one thread.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WAYS = ('forward', 'forward and backward')


def calls() -> dict[str, Callable[[], tuple[Callable, list]]]:
    """Small calls in bf16, by op: a function and what it has gradients for."""
    import torch

    import ttt_kernels as ops

    def tokens(*shape: int):
        return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)

    def weights(*shape: int):
        return torch.randn(*shape, requires_grad=True)

    def call(function, *tensors, **options):
        return lambda: function(*tensors, **options, backend='triton'), list(tensors)

    def linear():
        qkv = [tokens(1, 16, 2, 1, 64) for _ in range(3)]
        features = [weights(2, 1, 64) for _ in range(3)]
        small = (weights(1, 16, 2, 1), weights(2, 1, 64, 64), *features, weights(2, 16))
        return call(ops.ttt_linear, *qkv, *small)

    def step(function, *matrices, **options):
        return call(function, *[tokens(1, 16, 1, 32) for _ in range(3)], *matrices, **options)

    def sampling():
        reference = torch.rand(1, 16, 1, 2)
        value, offsets, logits = (
            tokens(1, 64, 2, 32),
            weights(1, 16, 2, 1, 4, 2),
            weights(1, 16, 2, 1, 4),
        )
        return (
            lambda: ops.deform_attn_fused(
                value, [(8, 8)], reference, offsets, logits, backend='triton'
            ),
            [value, offsets, logits],
        )

    return {
        'ttt_linear': linear,
        'causal_conv': lambda: call(
            ops.causal_conv, tokens(1, 16, 2, 64), weights(2, 64, 4), weights(2, 64, 4)
        ),
        'ttt_glu': lambda: step(ops.ttt_glu, *[weights(1, 32, 32) for _ in range(2)]),
        'ttt_mlp': lambda: step(ops.ttt_mlp, *[weights(1, 32, 32) for _ in range(3)], scale=0.2),
        'ttt_dwconv': lambda: call(
            ops.ttt_dwconv,
            *[tokens(1, 16, 32) for _ in range(3)],
            weights(32, 3, 3),
            hw=(4, 4),
        ),
        'deform_attn_fused': sampling,
    }


def stand_in() -> None:
    """Lets calls on CPU tensors go as far as the launch of a kernel on a GPU with sm_90."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from ttt_kernels import _backend

    class NoGpu:
        def get_current_target(self):
            return GPUTarget('cuda', 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    driver.set_active(NoGpu())
    CompiledKernel.run = property(lambda kernel: lambda *_: None)
    CompiledKernel._init_handles = lambda kernel: None
    _backend._unreachable = lambda *_: None
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def quickest(call: Callable[[], object], seconds: float) -> float:
    """Microseconds of a call: the third of all runs of four, in order of their time."""
    for _ in range(3):
        call()
    found, end = [], time.monotonic() + seconds
    while len(found) < 50 or time.monotonic() < end:
        start = time.process_time()
        for _ in range(4):
            call()
        found.append((time.process_time() - start) / 4 * 1e6)
    return sorted(found)[2]


def measure(seconds: float) -> dict[str, float]:
    """Microseconds by op and pass, in this process."""
    import torch

    torch.set_num_threads(1)
    stand_in()
    found = {}
    for op, build in calls().items():
        call, leaves = build()

        def forward(call=call) -> None:
            with torch.no_grad():
                call()

        def both(call=call, leaves=leaves) -> None:
            output = call()
            grads = torch.empty_like(output) if torch.is_tensor(output) else output
            torch.autograd.grad(output, leaves, grads)

        for way, function in zip(WAYS, (forward, both), strict=True):
            found[f'{op},{way}'] = quickest(function, seconds)
    return found


def in_checkout(path: Path, seconds: float) -> dict[str, float]:
    """`measure` with the kernels of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / 'ttt_kernels').symlink_to(path.resolve() / 'kernels')
        env = os.environ | {'PYTHONPATH': folder, 'OMP_NUM_THREADS': '1'}
        command = [sys.executable, __file__, '--one', '--seconds', str(seconds)]
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def processor() -> str:
    for line in Path('/proc/cpuinfo').read_text().splitlines():
        if line.startswith('model name'):
            return line.partition(':')[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--before', type=Path, help='a checkout to compare with')
    parser.add_argument('--rounds', type=int, default=5, help='turns of each checkout')
    parser.add_argument('--seconds', type=float, default=1.0, help='of a case in a turn, at least')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'benchmarks')
    parser.add_argument('--one', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.seconds)))
        return
    import torch
    import triton

    checkouts = {'after': ROOT} | ({'before': args.before} if args.before else {})
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        for name, path in checkouts.items():
            turns[name].append(in_checkout(path, args.seconds))
    about = {'cpu': processor(), 'torch': torch.__version__, 'triton': triton.__version__}
    rows = []
    for case in turns['after'][0]:
        op, way = case.split(',')
        us = {name: min(turn[case] for turn in found) for name, found in turns.items()}
        row = {**about, 'op': op, 'pass': way}
        row |= {f'{name}_us': round(us[name], 1) for name in reversed(us)}
        if 'before' in us:
            row['ratio'] = round(us['after'] / us['before'], 2)
        rows.append(row)
        print(*row.values(), sep='\t')
    path = args.out / 'host_time.csv'
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
    print(f'wrote {path}')


if __name__ == '__main__':
    main()
