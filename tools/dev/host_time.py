"""Host time of the ops and of training steps, beside torch's layer_norm, DeiT-S and Swin-T of timm.

    python tools/dev/host_time.py [--out FILE] [--profile vittt] [--only ops|steps|compiled]

Without a GPU the tensors are tiny, Triton's launches do nothing, and times are processor time of
one thread. `dispatch` is an op whose kernels only allocate their results: what the package adds to
a kernel. `launch` runs the kernels' own host code too, up to the launch itself. Triton's launcher,
some 10 to 20 µs for each of an op's launches, is in neither. Convolutions, which oneDNN computes
for longer than a GPU is launched, allocate their results only. Everything else runs on the CPU,
inductor's kernels in `compiled` included: steps whose blocks, or whose models, are compiled as in
the recipes, beside eager ones of the model they are compared with.

On a GPU nothing is replaced: wall, GPU and host time of the same ops and steps, at --size.
"""

import argparse
import contextlib
import cProfile
import csv
import functools
import io
import itertools
import os
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mmvttt.models.timm  # noqa: F401 - registers the models
import ttt_kernels
from ttt_kernels import _backend
from ttt_kernels._op import OPS, Op

BF16 = torch.bfloat16
PLAIN = dict(embed_dims=64, num_layers=12, num_heads=2, feedforward_channels=128)
STAGES = dict(embed_dims=(32, 64, 96, 128), depths=(1, 3, 9, 4), num_heads=(1, 2, 3, 4))
DEIT = dict(embed_dim=64, depth=12, num_heads=2, img_size=64)
SWIN = dict(embed_dim=32, num_heads=(1, 2, 4, 8), img_size=64, window_size=2)
# Name → timm's name, options that make it narrow, and what it is compared with.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    'DeiT-S': ('deit_small_patch16_224', DEIT, 'DeiT-S'),
    'Vittt-S': ('vittt_small_patch16_224', dict(arch=PLAIN), 'DeiT-S'),
    'ViT3-S': ('vit3_small_patch16_224', dict(arch=PLAIN), 'DeiT-S'),
    'T5-S': ('t5_small_patch16_224', dict(arch=PLAIN), 'DeiT-S'),
    'Swin-T': ('swin_tiny_patch4_window7_224', SWIN, 'Swin-T'),
    'H-ViT3-T': ('h_vit3_tiny', dict(arch=STAGES), 'Swin-T'),
}


class Row(NamedTuple):
    what: str
    way: str
    host: float
    ratio: float
    wall: float | None = None
    gpu: float | None = None
    calls: int | None = None
    casts: int | None = None


def op_calls(device: str) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Calls of torch's layer_norm and of every op, and their tensors, which require gradients."""

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(shape, device=device) * 0.1).to(dtype).requires_grad_()

    def tokens(count: int, *shape: int) -> list[Tensor]:
        return [new(*shape, dtype=BF16) for _ in range(count)]

    scan = [new(1, 4, 2, 2), new(2, 2, 32, 32), *(new(2, 2, 32) for _ in range(3)), new(2, 16)]
    weights = [new(2, 32, 32), new(2, 32, 32)]
    k = ttt_kernels
    return {
        'layer_norm': (
            lambda x, w, b: nn.functional.layer_norm(x, (32,), w, b),
            [new(1, 4, 2, 32), new(32), new(32)],
        ),
        'ttt_linear': (k.ttt_linear, [*tokens(3, 1, 4, 2, 2, 32), *scan]),
        'causal_conv': (
            lambda *x: k.causal_conv(*x)[0],
            [*tokens(1, 1, 4, 2, 32), new(2, 32, 4), new(2, 32, 4)],
        ),
        'ttt_glu': (k.ttt_glu, [*tokens(3, 1, 4, 2, 32), *weights]),
        'ttt_dwconv': (
            lambda *x: k.ttt_dwconv(*x, hw=(2, 2)),
            [*tokens(3, 1, 4, 32), new(32, 3, 3)],
        ),
        'ttt_mlp': (lambda *x: k.ttt_mlp(*x, scale=0.1), [*tokens(3, 1, 4, 2, 32), *weights]),
        'deform_attn': (
            lambda x, *y: k.deform_attn(x, [(2, 2)], *y),
            [*tokens(1, 1, 4, 2, 32), new(1, 4, 2, 1, 4, 2), new(1, 4, 2, 1, 4)],
        ),
    }


# ------------------------------------------------------------------------------- without a GPU


@contextlib.contextmanager
def only_allocating(op: Op) -> Iterator[None]:
    """Lets the op's passes allocate their results and do nothing else."""

    def backward(module, grads, args, kept, needs):
        tensors = [args[i] for i in op.tensors]
        return [x if x is None else torch.empty_like(x) for x in tensors]

    passes = op.forward, op.backward
    op.forward, op.backward = lambda module, args, keep: op.fake(args, keep), backward
    yield
    op.forward, op.backward = passes


_CONVOLUTIONS = torch.library.Library('aten', 'IMPL')


def convolution(x, weight, bias, stride, padding, *options):
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    sides = [(size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sizes]
    return x.new_zeros((x.shape[0], weight.shape[0], *sides)).contiguous(
        memory_format=torch.channels_last
    )


def convolution_backward(grad, x, weight, biases, *options):
    bias = grad.new_zeros(weight.shape[0])
    dx = torch.zeros_like(x, memory_format=torch.channels_last)
    zeros = dx, torch.zeros_like(weight), bias
    return tuple(y if need else None for y, need in zip(zeros, options[-1], strict=True))


def pretend_a_gpu() -> None:
    """Takes the Triton kernels for tensors in host memory, without launching them."""
    from triton.runtime.jit import JITFunction

    JITFunction.run = lambda *_, **__: None
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    _backend._unreachable = lambda *_: None
    os.environ[_backend.VARIABLE] = 'triton'
    _CONVOLUTIONS.impl('convolution', convolution, 'CPU')
    _CONVOLUTIONS.impl('convolution_backward', convolution_backward, 'CPU')
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------- measuring


def host_times(calls: dict[Any, Callable[[], Any]], seconds: float, cuda: bool) -> dict[Any, float]:
    """Least time of each call in several rounds over all, in µs.

    Time of the processor, or on a GPU the time until the call returns.
    """
    clock = time.perf_counter if cuda else time.process_time
    times: dict[Any, list[float]] = {name: [] for name in calls}
    numbers, end = {}, 0.0
    while not end or time.perf_counter() < end:
        for name, call in calls.items():
            if not end:
                call()
                start = clock()
                call()
                numbers[name] = max(1, int(0.02 / max(clock() - start, 1e-6)))
            if cuda:
                torch.cuda.synchronize()
            start = clock()
            for _ in range(numbers[name]):
                call()
            times[name].append((clock() - start) / numbers[name] * 1e6)
        end = end or time.perf_counter() + seconds * len(calls)
    return {name: min(values) for name, values in times.items()}


def gpu_times(call: Callable[[], Any]) -> tuple[float, float]:
    """Median wall time of a call, and the sum of its kernels' times, in µs."""
    walls = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - start) * 1e6)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return statistics.median(walls), sum(e.self_device_time_total for e in profile.key_averages())


class Calls(TorchDispatchMode):
    """Counts torch's calls, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name.split('::')[1]] += not func.is_view
        return func(*args, **(kwargs or {}))


def time_ops(device: str, seconds: float) -> Iterator[Row]:
    """Every op without a graph, with one, and forward and backward."""
    for way in ('dispatch', 'launch'):
        with contextlib.ExitStack() as stack:
            for op in OPS.values() if way == 'dispatch' else ():
                stack.enter_context(only_allocating(op))
            runs = {}
            for name, (call, tensors) in op_calls(device).items():
                run = functools.partial(call, *tensors)
                runs[name, 'no graph'] = torch.no_grad()(run)
                runs[name, 'graph'] = run
                runs[name, 'forward + backward'] = functools.partial(backward, call, tensors)
            times = host_times(runs, seconds, device == 'cuda')
        for (name, part), value in times.items():
            yield Row(name, f'{way}, {part}', value, value / times['layer_norm', part])


def backward(call: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    out = call(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def training_step(
    name: str, device: str, size: tuple[int, int, int], compiled: str = ''
) -> Callable[[], None]:
    """Forward under bf16 autocast, backward, and gradients to None; no optimizer."""
    model, options, _ = MODELS[name]
    batch, *sides = size
    if device == 'cuda':
        options = {'img_size': sides}
    net = timm.create_model(model, num_classes=10, **options).to(device).train()
    if compiled:
        from mmvttt.deploy.compile import compile_blocks

        compile_blocks(net, dynamic=False, whole=compiled == 'model')
    x = torch.randn(batch, 3, *sides, device=device)

    def step() -> None:
        with torch.autocast(device, BF16):
            out = net(x)
        out.float().square().mean().backward()
        net.zero_grad(set_to_none=True)

    return step


def time_steps(
    names: list[str],
    device: str,
    seconds: float,
    size: tuple[int, int, int],
    profile: str,
    compiled: bool = False,
) -> Iterator[Row]:
    """A training step of every model, and its calls of torch and casts among them."""
    ways = dict.fromkeys(MODELS[name][2] for name in names) if compiled else names
    steps = {(name, 'step'): training_step(name, device, size) for name in ways}
    for name, part in itertools.product(names if compiled else (), ('blocks', 'model')):
        steps[name, f'step, compiled {part}'] = training_step(name, device, size, part)
    hosts = host_times(steps, seconds, device == 'cuda')
    for (name, way), step in steps.items():
        wall, gpu = gpu_times(step) if device == 'cuda' else (None, None)
        host = hosts[name, way]
        ratio = host / hosts[MODELS[name][2], 'step']
        if way != 'step':
            yield Row(name, way, host, ratio, wall, gpu)
            continue
        with Calls() as calls:
            step()
        count = sum(calls.counts.values())
        yield Row(name, way, host, ratio, wall, gpu, count, calls.counts['_to_copy'])
        if profile and profile.lower() in name.lower():
            print(profiled(step), '\n', calls.counts.most_common(25))


def profiled(step: Callable[[], None]) -> str:
    """Functions of five steps by their own time."""
    with cProfile.Profile() as profile:
        for _ in range(5):
            step()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats('tottime').print_stats(30)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--only', choices=['ops', 'steps', 'compiled'])
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS))
    parser.add_argument('--seconds', type=float, default=2.0, help='for each figure')
    parser.add_argument('--size', default='128x224x224', help='of a step on a GPU')
    parser.add_argument('--profile', default='', help='model whose step is profiled')
    parser.add_argument('--out', type=Path, help='CSV file')
    args = parser.parse_args()
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    batch, height, width = map(int, args.size.split('x')) if device == 'cuda' else (1, 64, 64)
    if device == 'cpu':
        pretend_a_gpu()
    names = list(dict.fromkeys(x for n in args.models for x in (MODELS[n][2], n)))
    rows: list[Row] = []
    how = names, device, args.seconds, (batch, height, width), args.profile
    parts = {
        'ops': lambda: time_ops(device, args.seconds / 4),
        'steps': lambda: time_steps(*how),
        'compiled': lambda: time_steps(*how, compiled=True),
    }
    for part in [args.only] if args.only else ['ops', 'steps']:
        for row in parts[part]():
            rows.append(row)
            print(
                f'{row.what:<12} {row.way:<30} {row.host:>9.1f} µs {row.ratio:>6.2f}×',
                *(f'{k} {v:.0f}' for k, v in row._asdict().items() if k in row._fields[4:] and v),
                flush=True,
            )
    if args.out:
        with args.out.open('w', newline='') as file:
            writer = csv.writer(file)
            writer.writerow(Row._fields)
            writer.writerows(rows)


if __name__ == '__main__':
    main()
