"""Counts what one block moves and launches, forward and backward: no GPU, no memory of that size.

    python tools/dev/kernel_benchmarks/block_bytes.py
    python tools/dev/kernel_benchmarks/block_bytes.py --unfused
    python tools/dev/kernel_benchmarks/block_bytes.py --operators Vittt-S

Fake tensors go through a block under bf16 autocast; every operator counts what it reads and writes,
once, and one launch. Forward is inference, with the weights of linear layers in bf16 as
`autocast_backbone` keeps them; backward is training. Views are free, and a registered op of
`ttt_kernels` is one operator: what its kernels write for themselves is not counted. Counted, not
measured.
"""

import argparse
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import ttt_kernels
from mmvttt.models.adapters import ViTAdapter
from mmvttt.models.backbones import T5, HViT3, ViT3, Vittt

IMAGES = (2, 3, 800, 1344)
HEAD = """\
| block | forward, MB | launches | backward, MB | launches | backbone forward, launches |
|---|---|---|---|---|---|"""


def adapter() -> nn.Module:
    return ViTAdapter(Vittt('small'))


# Backbone, and the first block of its longest stage.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    'Vittt-S': (functools.partial(Vittt, 'small'), 'blocks.0'),
    'ViT³-S': (functools.partial(ViT3, 'small'), 'blocks.0'),
    'T⁵-S': (functools.partial(T5, 'small'), 'blocks.0'),
    'H-ViT³-T, stage 3': (functools.partial(HViT3, 'tiny'), 'stages.2.blocks.0'),
    'ViT-Adapter, Vittt-S: injector': (adapter, 'interactions.0.injector'),
    'ViT-Adapter, Vittt-S: extractor': (adapter, 'interactions.0.extractors.0'),
}


class LikeCuda(TorchFunctionMode):
    """Runs LayerNorm in fp32 under a CPU's autocast, as CUDA's does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.layer_norm and torch.is_autocast_enabled('cpu'):
            with torch.autocast('cpu', enabled=False):
                args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs or {}))
                return function(*args, **kwargs)
        return function(*args, **(kwargs or {}))


class Traffic(TorchDispatchMode):
    """Sums up bytes and launches by operator, in `bytes` and `launches`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()

    @property
    def megabytes(self) -> float:
        return self.bytes.total() / 1e6

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        storages = {x.untyped_storage()._cdata for x in read}
        view = all(x.untyped_storage()._cdata in storages for x in written)
        name = func._schema.name
        if (view and not func._schema.is_mutable) or 'empty' in name or not written:
            return out
        self.bytes[name] += sum(map(extent, read)) + sum(map(extent, written))
        self.launches[name] += 1
        return out


def extent(x: Tensor) -> int:
    """Bytes of the numbers that a tensor has in memory; an expanded one has each once."""
    sizes = (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return functools.reduce(int.__mul__, sizes, 1) * x.element_size()


class Count(NamedTuple):
    """Bytes and launches of a block, and the launches of its backbone's forward pass."""

    forward: Traffic
    backward: Traffic
    backbone: Traffic


@contextmanager
def as_on_a_gpu(fake: FakeTensorMode, fused: bool = True) -> Iterator[None]:
    parts = mock.patch.object(ttt_kernels, 'fuses', return_value=fused)
    with parts, fake, LikeCuda(), torch.autocast('cpu', torch.bfloat16):
        yield


def count(model: str, fused: bool = True) -> Count:
    """Counts one of `BLOCKS`; unfused, the weights are rounded in every call too."""
    build, path = BLOCKS[model]
    calls: list[tuple[tuple, dict]] = []
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device('meta'):
        backbone = build()
    block = backbone.get_submodule(path)
    trained = copy.deepcopy(block)
    for module in backbone.modules():
        if fused and type(module) is nn.Linear:
            module.bfloat16()
    hook = block.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with as_on_a_gpu(fake, fused), torch.no_grad():
        backbone.to_empty(device='cpu')
        images = torch.empty(IMAGES)
        with Traffic() as whole:
            backbone(images)
    hook.remove()
    (x, *args), kwargs = calls[0]
    # Weights are cast once in an autocast: every pass has one of its own.
    with as_on_a_gpu(fake, fused), torch.no_grad(), Traffic() as forward:
        block(x, *args, **kwargs)
    with as_on_a_gpu(fake, fused):
        trained.to_empty(device='cpu')
        out = trained(x.requires_grad_(), *args, **kwargs)
    with fake, Traffic() as backward:
        torch.autograd.grad(out, [x, *trained.parameters()], torch.empty_like(out))
    return Count(forward, backward, whole)


def row(model: str, fused: bool = True) -> str:
    """A line of the table, in Markdown."""
    forward, backward, whole = count(model, fused)
    passes = (f'{t.megabytes:.0f} | {t.launches.total()}' for t in (forward, backward))
    return f'| {model} | {" | ".join(passes)} | {whole.launches.total()} |'


def table(fused: bool = True) -> str:
    """All of `BLOCKS` in Markdown."""
    return '\n'.join([HEAD, *(row(model, fused) for model in BLOCKS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--operators', choices=BLOCKS, help='list the operators of one block')
    parser.add_argument(
        '--unfused',
        action='store_true',
        help="torch's operations for the fused parts, as where their kernels cannot run",
    )
    args = parser.parse_args()
    if args.operators is None:
        print(table(not args.unfused))
        return
    for name, traffic in count(args.operators, not args.unfused)._asdict().items():
        print(f'\n{name}: {traffic.megabytes:.1f} MB, {traffic.launches.total()} launches')
        for operator, moved in traffic.bytes.most_common():
            print(f'{moved / 1e6:10.1f} MB {traffic.launches[operator]:5} {operator}')


if __name__ == '__main__':
    main()
