"""Host time of the ops and of training steps, beside torch's layer_norm, DeiT-S and Swin-T of timm.

    python tools/dev/host_time.py [--out FILE] [--only ops|launches|steps|compiled]

Without a GPU the tensors are tiny, launches do nothing, and times are processor time of one thread.
`launches` has the ops with all of a launch but the driver's part. Triton compiles them first.
Convolutions, which oneDNN computes for longer than a GPU is launched, allocate their results only.
Everything else runs on the CPU, inductor's kernels in `compiled` included: steps whose blocks, or
whose models, are compiled as in the recipes.

On a GPU nothing is replaced: wall, GPU and host time of the same ops and steps, at --size.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import compile_kernels
import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mmvttt.models.timm  # noqa: F401 - registers the models
from mmvttt.analysis.benchmark import time_batches
from mmvttt.analysis.tables import write_csv
from mmvttt.deploy.compile import compile_blocks, compiling
from ttt_kernels import (
    _backend,
    _launch,
    causal_conv,
    deform_attn,
    ttt_dwconv,
    ttt_glu,
    ttt_linear,
    ttt_mlp,
)

Row = dict[str, Any]
DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
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


def pretend_a_gpu(launches: bool = False) -> None:
    """Takes the Triton kernels for tensors in host memory, without launching them."""

    def convolution(x, weight, bias, stride, padding, *options):
        sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
        sides = [(size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sizes]
        out = x.new_zeros((x.shape[0], weight.shape[0], *sides))
        return out.contiguous(memory_format=torch.channels_last)

    def convolution_backward(grad, x, weight, biases, *options):
        dx = torch.zeros_like(x, memory_format=torch.channels_last)
        zeros = dx, torch.zeros_like(weight), grad.new_zeros(weight.shape[0])
        return tuple(y if need else None for y, need in zip(zeros, options[-1], strict=True))

    if not launches:
        _launch.Launch.__call__ = lambda self, **_: None
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    _backend._unreachable = lambda *_: None
    os.environ[_backend.VARIABLE] = 'triton'
    torch.library.impl('aten::convolution', 'CPU', convolution)
    torch.library.impl('aten::convolution_backward', 'CPU', convolution_backward)
    torch.set_num_threads(1)


def host_times(calls: dict[Any, Callable[[], Any]], seconds: float) -> dict[Any, float]:
    """Least time of each call in several rounds over all, in µs.

    Time of the processor, or on a GPU the time until the call returns.
    """
    clock = time.perf_counter if DEVICE.type == 'cuda' else time.process_time
    times: dict[Any, list[float]] = {name: [] for name in calls}
    numbers, end = {}, 0.0
    while not end or time.perf_counter() < end:
        for name, call in calls.items():
            if not end:
                call()
                start = clock()
                call()
                numbers[name] = max(1, int(0.02 / max(clock() - start, 1e-6)))
            if DEVICE.type == 'cuda':
                torch.cuda.synchronize()
            start = clock()
            for _ in range(numbers[name]):
                call()
            times[name].append((clock() - start) / numbers[name] * 1e6)
        end = end or time.perf_counter() + seconds * len(calls)
    return {name: min(values) for name, values in times.items()}


def op_calls() -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Calls of torch's layer_norm and of every op, and their tensors, which require gradients."""

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(shape, device=DEVICE) * 0.1).to(dtype).requires_grad_()

    def tokens(count: int, *shape: int) -> list[Tensor]:
        return [new(*shape, dtype=torch.bfloat16) for _ in range(count)]

    scan = [new(1, 4, 2, 2), new(2, 2, 32, 32), *(new(2, 2, 32) for _ in range(3)), new(2, 16)]
    heads, matrices = tokens(3, 1, 4, 2, 32), [new(2, 32, 32), new(2, 32, 32)]
    samples = [*tokens(1, 1, 4, 2, 32), new(1, 4, 2, 1, 4, 2), new(1, 4, 2, 1, 4)]
    return {
        'layer_norm': (
            lambda x, *affine: nn.functional.layer_norm(x, (32,), *affine),
            [new(1, 4, 2, 32), new(32), new(32)],
        ),
        'ttt_linear': (ttt_linear, [*tokens(3, 1, 4, 2, 2, 32), *scan]),
        'causal_conv': (
            lambda *x: causal_conv(*x)[0],
            [*tokens(1, 1, 4, 2, 32), new(2, 32, 4), new(2, 32, 4)],
        ),
        'ttt_glu': (ttt_glu, [*heads, *matrices]),
        'ttt_dwconv': (partial(ttt_dwconv, hw=(2, 2)), [*tokens(3, 1, 4, 32), new(32, 3, 3)]),
        'ttt_mlp': (partial(ttt_mlp, scale=0.1), [*heads, *matrices]),
        'deform_attn': (lambda x, *y: deform_attn(x, [(2, 2)], *y), samples),
    }


def backward(call: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    out = call(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def time_ops(seconds: float) -> Iterator[Row]:
    """Every op without a graph, with one, and forward and backward."""
    runs = {}
    for name, (call, tensors) in op_calls().items():
        run = partial(call, *tensors)
        runs[name, 'no graph'] = torch.no_grad()(run)
        runs[name, 'graph'] = run
        runs[name, 'forward + backward'] = partial(backward, call, tensors)
    times = host_times(runs, seconds)
    for (name, way), value in times.items():
        yield dict(what=name, way=way, host_us=value, ratio=value / times['layer_norm', way])


def time_launches(seconds: float) -> Iterator[Row]:
    """`time_ops` with the launches that a driver would receive."""
    with nullcontext() if DEVICE.type == 'cuda' else compile_kernels.compiled_for(90):
        for row in time_ops(seconds):
            yield row | {'way': f'{row["way"]}, launches'}


def training_step(name: str, size: list[int], compiled: str) -> Callable[[], None]:
    """Forward under bf16 autocast, backward, and gradients to None, without an optimizer."""
    model, options, _ = MODELS[name]
    batch, *sides = size
    if DEVICE.type == 'cuda':
        options = dict(img_size=sides)
    net = timm.create_model(model, num_classes=10, **options).to(DEVICE).train()
    if compiled:
        compile_blocks(net, dynamic=False, whole=compiled == 'model')
    x = torch.randn(batch, 3, *sides, device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            out = net(x)
        out.float().square().mean().backward()
        net.zero_grad(set_to_none=True)

    return step


class Calls(TorchDispatchMode):
    """Counts torch's calls, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name.split('::')[1]] += not func.is_view
        return func(*args, **(kwargs or {}))


def time_steps(seconds: float, size: list[int], ways: tuple[str, ...]) -> Iterator[Row]:
    """A training step of every model, and its calls of torch and casts among them."""
    steps = {
        (name, way): training_step(name, size, way)
        for way in ('', *ways)
        for name in MODELS
        if way or not ways or name == MODELS[name][2]
    }
    hosts = host_times(steps, seconds)
    for (name, way), step in steps.items():
        ratio = hosts[name, way] / hosts[MODELS[name][2], '']
        title = f'step, compiled {way}' if way else 'step'
        row = dict(what=name, way=title, host_us=hosts[name, way], ratio=ratio)
        if DEVICE.type == 'cuda':
            times = time_batches(step, DEVICE, 8)
            row |= dict(wall_us=1000 * times['latency_ms'], gpu_us=1000 * times['gpu_ms'])
        if not way:
            with Calls() as calls:
                step()
            row |= dict(calls=calls.counts.total(), casts=calls.counts['_to_copy'])
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--only', choices=['ops', 'launches', 'steps', 'compiled'])
    parser.add_argument('--seconds', type=float, default=2.0, help='for each figure')
    parser.add_argument('--size', default='128x224x224', help='of a step on a GPU')
    parser.add_argument('--out', default='host_time.csv')
    args = parser.parse_args()
    size = [1, 64, 64]
    if DEVICE.type == 'cuda':
        size = [int(n) for n in args.size.split('x')]
    else:
        pretend_a_gpu(launches=args.only == 'launches')
    parts = {
        'ops': partial(time_ops, args.seconds / 4),
        'launches': partial(time_launches, args.seconds / 4),
        'steps': partial(time_steps, args.seconds, size, ()),
        'compiled': partial(time_steps, args.seconds, size, ('blocks', 'model')),
    }
    rows: list[Row] = []
    for part in [args.only] if args.only else ['ops', 'steps']:
        with compiling():
            for row in parts[part]():
                rows.append({k: f'{v:.4g}' if isinstance(v, float) else v for k, v in row.items()})
                print(*(f'{name} {value}' for name, value in rows[-1].items()), flush=True)
            write_csv(rows, args.out)


if __name__ == '__main__':
    main()
