"""Times what runs on a CPU side by side: ops, whole backbones, a training step of the demo.

    python tools/dev/kernel_benchmarks/cpu.py --threads 2    # writes docs/benchmarks/cpu_<name>.csv
    python tools/dev/kernel_benchmarks/cpu.py --only scan --out work_dirs

'numba' is what runs on a CPU where numba is installed, 'reference' what runs without it, 'eager' a
backbone with its inner models as one would write them in PyTorch. Contenders take turns, and the
least of `--repeats` times counts. On a busy machine, `--clock cpu --threads 1` counts the
processor's time instead of the clock's.
"""

import argparse
import csv
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numba
import timm
import torch
from torch import Tensor, nn
from ttt_glu import eager_dwconv, eager_glu

from mmvttt.models.backbones import HViT3, ViT3, Vittt
from mmvttt.models.layers import vit3_mixer
from mmvttt.openmmlab.analysis.memory.training_step import TrainingStep
from mmvttt.openmmlab.analysis.models import find_model
from ttt_kernels import _backend, deform_attn, ttt_dwconv, ttt_glu, ttt_linear

ROOT = Path(__file__).resolve().parents[3]
FIELDS = (
    'cpu',
    'threads',
    'torch',
    'numba',
    'clock',
    'what',
    'case',
    'pass',
    'contender',
    'ms',
    'ratio',
)
Call = Callable[[], object]


def cpu_name() -> str:
    """The processor's name; on Linux alone Python does not know it."""
    try:
        return re.search(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())[1].strip()
    except (OSError, TypeError):
        import platform

        return platform.processor() or platform.machine()


def without_numba(call: Call, *ops: str) -> Call:
    """`call` as it runs where the kernels of `ops` (all, where none is named) are missing."""
    load = _backend.load_kernel

    def missing(op: str, backend: str = 'triton') -> object:
        return 'left out' if backend == 'numba' and (not ops or op in ops) else load(op, backend)

    def run() -> object:
        with patch.object(_backend, 'load_kernel', missing):
            return call()

    return run


def eager_inner_models(call: Call) -> Call:
    """`call` with ViT³'s ops replaced by their formulas in PyTorch."""

    def run() -> object:
        with ExitStack() as stack:
            for name, op in (('ttt_glu', _eager_glu), ('ttt_dwconv', _eager_dwconv)):
                stack.enter_context(patch.object(vit3_mixer, name, op))
            return call()

    return run


def _eager_glu(*tensors: Tensor, **options: object) -> Tensor:
    return eager_glu(*tensors)


def _eager_dwconv(*tensors: Tensor, hw: tuple[int, int], **options: object) -> Tensor:
    return eager_dwconv(*tensors, hw)


# ----------------------------------------------------------------------------------------- cases

Case = tuple[str, str, str, dict[str, Call]]  # what, case, pass, contenders


def passes(call: Callable[[], Tensor], leaves: list[Tensor]) -> Iterator[tuple[str, Call]]:
    """The forward pass without gradients, and the training's two passes."""
    gradient = torch.randn_like(call().detach())

    def forward() -> None:
        with torch.no_grad():
            call()

    def both() -> None:
        torch.autograd.grad(call(), leaves, gradient, allow_unused=True)

    yield 'fwd', forward
    yield 'fwd+bwd', both


def scans(*sizes: tuple[int, int]) -> Iterator[Case]:
    """Vittt-T's two scans of two images: 3 heads of 64 channels; tokens and b."""
    for tokens, b in sizes:
        leaves = [torch.randn(2, tokens, 2, 3, 64) for _ in range(3)]
        leaves += [torch.full((2, tokens, 2, 3), 0.5 / 64), 0.02 * torch.randn(2, 3, 64, 64)]
        leaves += [torch.zeros(2, 3, 64), torch.ones(2, 3, 64), torch.zeros(2, 3, 64)]
        leaves += [(1 / torch.arange(1, b + 1)).repeat(2, 1)]
        leaves = [x.requires_grad_() for x in leaves]
        name = f'T={tokens}' if b == 16 else f'T={tokens} b={b}'
        for way, call in passes(lambda x=leaves, b=b: ttt_linear(*x, mini_batch_size=b), leaves):
            yield 'scan', name, way, {'numba': call, 'reference': without_numba(call)}


def inner_steps() -> Iterator[Case]:
    """ViT³'s two inner models, on maps of ViT³ and H-ViT³."""
    for batch, side, heads, dim in (
        (1, 14, 6, 32),
        (1, 32, 6, 32),
        (4, 32, 6, 64),
        (1, 128, 2, 32),
    ):
        q, k, v = torch.randn(batch, side * side, 3, heads, dim).unbind(2)
        weights = (torch.randn(heads, dim, dim) / dim**0.5 for _ in range(2))
        leaves = [x.requires_grad_() for x in (q, k, v, *weights)]
        eager = dict(passes(lambda x=leaves: eager_glu(*x), leaves))
        for way, call in passes(lambda x=leaves: ttt_glu(*x), leaves):
            contenders = {'numba': call, 'reference': without_numba(call), 'eager': eager[way]}
            yield 'ttt_glu', f'{batch} x {side}x{side}, {heads} x {dim}', way, contenders
    for batch, side, dim in ((1, 14, 32), (1, 56, 32), (2, 32, 64), (1, 80, 32)):
        hw = side, side
        q, k, v = torch.randn(batch, side * side, 3, dim).unbind(2)
        leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(dim, 3, 3) / 3)]
        eager = dict(passes(lambda x=leaves, hw=hw: eager_dwconv(*x, hw), leaves))
        for way, call in passes(lambda x=leaves, hw=hw: ttt_dwconv(*x, hw=hw), leaves):
            contenders = {'numba': call, 'reference': without_numba(call), 'eager': eager[way]}
            yield 'ttt_dwconv', f'{batch} x {side}x{side}, {dim}', way, contenders


def deformable() -> Iterator[Case]:
    """The ViT-Adapter's injector at 800×1344: three levels, 6 heads of 32 channels."""
    shapes = [(100, 168), (50, 84), (25, 42)]
    pixels, queries = sum(h * w for h, w in shapes), shapes[1][0] * shapes[1][1]
    value = torch.randn(1, pixels, 6, 32, requires_grad=True)
    places = torch.rand(1, queries, 6, 3, 4, 2, requires_grad=True)
    weights = torch.rand(1, queries, 6, 3, 4).requires_grad_()
    leaves = [value, places, weights]
    for way, call in passes(lambda: deform_attn(value, shapes, places, weights), leaves):
        yield 'deform_attn', 'injector', way, {'numba': call, 'reference': without_numba(call)}


def network(model: nn.Module, size: int) -> Iterator[tuple[str, Call]]:
    """A backbone on one image."""
    images = torch.randn(1, 3, size, size)

    def call() -> Tensor:
        out = model(images)
        return out[-1] if isinstance(out, tuple) else out

    return passes(call, list(model.parameters()))


def vittt() -> Iterator[Case]:
    """Vittt-T against DeiT-T."""
    for size in (224, 512, 768):
        deit = timm.create_model('deit_tiny_patch16_224', img_size=size, num_classes=0).eval()
        ours = network(Vittt('tiny', img_size=size).eval(), size)
        for (way, call), (_, other) in zip(ours, network(deit, size), strict=True):
            contenders = {'numba': call, 'reference': without_numba(call), 'DeiT-T (timm)': other}
            yield 'Vittt-T', f'{size}x{size}', way, contenders


def vit3() -> Iterator[Case]:
    """ViT³-T and H-ViT³-T against themselves in eager PyTorch."""
    for name, build in (('ViT3-T', ViT3), ('H-ViT3-T', HViT3)):
        for size in (224, 512):
            for way, call in network(build('tiny').eval(), size):
                yield name, f'{size}x{size}', way, {'ours': call, 'eager': eager_inner_models(call)}


def demo() -> Iterator[Case]:
    """A step of `make demo`: loss, gradients and optimizer, on grey images with made-up objects."""
    step = TrainingStep(
        find_model('maskrcnn_vittt_demo'), 4, (160, 160), device=torch.device('cpu')
    )

    def call() -> None:
        step.backward(step.forward())
        step.update()

    contenders = {
        'numba': call,
        'reference': without_numba(call),
        'numba but for deform_attn': without_numba(call, 'deform_attn'),
    }
    yield 'demo', '4 x 160x160', 'step', contenders


CASES = {
    'scan': lambda: scans((196, 16), (1024, 16), (1600, 16), (6400, 16)),
    'mini_batch': lambda: scans((1024, 64), (1024, 128), (196, 196), (1024, 512), (1024, 1024)),
    'inner_step': inner_steps,
    'deform_attn': deformable,
    'vittt': vittt,
    'vit3': vit3,
    'demo': demo,
}


# ----------------------------------------------------------------------------------- measurement


def least(
    contenders: dict[str, Call], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds of each, the least of several; they take turns."""
    times = dict.fromkeys(contenders, float('inf'))
    for repeat in range(repeats + 1):
        for name, call in contenders.items():
            start = clock()
            call()
            # The first call compiles.
            if repeat:
                times[name] = min(times[name], 1e3 * (clock() - start))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--clock', choices=('wall', 'cpu'), default='wall')
    parser.add_argument('--only', nargs='+', choices=CASES, default=list(CASES))
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'benchmarks')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock = time.perf_counter if args.clock == 'wall' else time.process_time
    versions = torch.__version__, numba.__version__
    about = dict(zip(FIELDS[:5], (cpu_name(), args.threads, *versions, args.clock), strict=True))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f'cpu_{re.sub("[^a-z0-9]+", "_", cpu_name().lower()).strip("_")}.csv'
    with path.open('w', newline='', buffering=1) as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for part in args.only:
            for what, case, way, contenders in CASES[part]():
                times = least(contenders, args.repeats, clock)
                first = next(iter(times.values()))
                for name, ms in times.items():
                    row = dict(what=what, case=case, contender=name, ms=round(ms, 2))
                    row |= {'pass': way, 'ratio': round(ms / first, 2)}
                    writer.writerow(about | row)
                    print(*(row[f] for f in FIELDS[5:]), sep='\t', flush=True)
    print(f'wrote {path}; ratio is the time as a multiple of the first contender’s')
    return 0


if __name__ == '__main__':
    sys.exit(main())
