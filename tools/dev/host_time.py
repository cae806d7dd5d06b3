"""Host time of the ops and of training steps, beside torch's layer_norm, DeiT-S and Swin-T of timm.

    python tools/dev/host_time.py [--out FILE] [--only ops|steps|compiled] [--size 128x224x224]

On a GPU: the host's time of the ops, on tiny tensors, and wall, GPU and host time of training
steps; with `--only compiled` of steps whose blocks, or models, are compiled as in the recipes.
Without a GPU: the ops only. Their tensors are in host memory, their kernels are not launched, and
times are processor time of one thread.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

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
ROUNDS = 20
DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
# timm's name → the one that it is compared with.
MODELS = {
    'deit_small_patch16_224': 'deit_small_patch16_224',
    'vittt_small_patch16_224': 'deit_small_patch16_224',
    'vit3_small_patch16_224': 'deit_small_patch16_224',
    't5_small_patch16_224': 'deit_small_patch16_224',
    'swin_tiny_patch4_window7_224': 'swin_tiny_patch4_window7_224',
    'h_vit3_tiny': 'swin_tiny_patch4_window7_224',
}


def pretend_a_gpu() -> None:
    """Takes the Triton kernels for tensors in host memory, without launching them."""
    _launch.Launch.__call__ = lambda self, **_: None
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    _backend._unreachable = lambda *_: None
    os.environ[_backend.VARIABLE] = 'triton'
    torch.set_num_threads(1)


def host_times(calls: dict[Any, Callable[[], Any]], number: int) -> dict[Any, float]:
    """Least time of a call in `ROUNDS` rounds over all, in µs, a mean of `number` in a row.

    Time of the processor, or on a GPU the time until the call returns.
    """
    clock = time.perf_counter if DEVICE.type == 'cuda' else time.process_time
    timers = {
        name: Timer('call()', globals={'call': call}, timer=clock) for name, call in calls.items()
    }
    times: dict[Any, list[float]] = {name: [] for name in calls}
    # The first round compiles.
    for _ in range(1 + ROUNDS):
        for name, timer in timers.items():
            if DEVICE.type == 'cuda':
                torch.cuda.synchronize()
            times[name].append(timer.timeit(number).mean * 1e6)
    return {name: min(values[1:]) for name, values in times.items()}


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


def time_ops() -> Iterator[Row]:
    """Every op without a graph, with one, and forward and backward."""
    runs = {}
    for name, (call, tensors) in op_calls().items():
        run = partial(call, *tensors)
        runs[name, 'no graph'] = torch.no_grad()(run)
        runs[name, 'graph'] = run
        runs[name, 'forward + backward'] = partial(backward, call, tensors)
    times = host_times(runs, 100)
    for (name, way), value in times.items():
        yield dict(what=name, way=way, host_us=value, ratio=value / times['layer_norm', way])


def training_step(name: str, size: list[int], compiled: str) -> Callable[[], None]:
    """Forward under bf16 autocast, backward, and gradients to None, without an optimizer."""
    batch, *sides = size
    net = timm.create_model(name, num_classes=10, img_size=sides).to(DEVICE).train()
    if compiled:
        compile_blocks(net, dynamic=False, whole=compiled == 'model')
    x = torch.randn(batch, 3, *sides, device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            out = net(x)
        out.float().square().mean().backward()
        net.zero_grad(set_to_none=True)

    return step


def time_steps(size: list[int], ways: tuple[str, ...]) -> Iterator[Row]:
    """A training step of every model, by way of compilation; '' is eager."""
    eager = MODELS if not ways else {*MODELS.values()}
    steps = {(name, ''): training_step(name, size, '') for name in eager}
    steps |= {(name, way): training_step(name, size, way) for way in ways for name in MODELS}
    hosts = host_times(steps, 1)
    for (name, way), step in steps.items():
        times = time_batches(step, DEVICE, 8)
        yield dict(
            what=name,
            way=f'step, compiled {way}' if way else 'step',
            host_us=hosts[name, way],
            ratio=hosts[name, way] / hosts[MODELS[name], ''],
            wall_us=1000 * times['latency_ms'],
            gpu_us=1000 * times['gpu_ms'],
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--only', choices=['ops', 'steps', 'compiled'])
    parser.add_argument('--size', default='128x224x224', help='of a step')
    parser.add_argument('--out', default='host_time.csv')
    args = parser.parse_args()
    size = [int(n) for n in args.size.split('x')]
    chosen = [args.only] if args.only else ['ops', 'steps']
    if DEVICE.type != 'cuda':
        if args.only not in (None, 'ops'):
            parser.error('training steps need a GPU')
        chosen = ['ops']
        pretend_a_gpu()
    parts = {
        'ops': time_ops,
        'steps': partial(time_steps, size, ()),
        'compiled': partial(time_steps, size, ('blocks', 'model')),
    }
    rows: list[Row] = []
    for part in chosen:
        with compiling():
            for row in parts[part]():
                rows.append({k: f'{v:.4g}' if isinstance(v, float) else v for k, v in row.items()})
                print(*(f'{name} {value}' for name, value in rows[-1].items()), flush=True)
            write_csv(rows, args.out)


if __name__ == '__main__':
    main()
