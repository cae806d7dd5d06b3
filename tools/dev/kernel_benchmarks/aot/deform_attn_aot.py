"""Compiles the kernels of deformable attention for GPUs that need not be there, and counts.

    export PYTHONPATH=tools/dev/kernel_benchmarks                        # for kernel_launches.py
    python tools/dev/kernel_benchmarks/aot/deform_attn_aot.py            # compare with the table
    python tools/dev/kernel_benchmarks/aot/deform_attn_aot.py --update   # write the table

The op is called as the ViT-Adapter calls it, with logits and offsets, and its launches are
compiled. The table, deform_attn_aot.json, is by Triton version; table.py counts what is in it, and
tests/kernels/test_launched_aot.py holds the kernels to it.
"""

import functools
import os
import sys
from pathlib import Path

if __name__ == '__main__':
    # Before Triton is imported: the interpreter compiles nothing, and a cache measures nothing.
    os.environ.pop('TRITON_INTERPRET', None)
    os.environ.setdefault('TRITON_ALWAYS_COMPILE', '1')

import torch
from kernel_launches import compiled_for
from table import TYPES, command
from triton.compiler import CompiledKernel

from ttt_kernels import deform_attn_fused

TABLE = Path(__file__).with_suffix('.json')
KERNELS = ('forward', 'backward_points', 'backward_value')
# Levels that are read: by the extractors one, by the injectors three.
LEVELS = {'1 level': ((8, 8),), '3 levels': ((8, 8), (4, 4), (2, 2))}
ARCHS = (80, 90)


def variants(everything: bool) -> list[str]:
    """Names such as 'forward/bf16/32/3 levels/sm_90'.

    Not everything: in bf16 on sm_90, 32 channels with one level and 64 with three.
    """
    return [
        f'{kernel}/{dtype}/{dim}/{levels}/sm_{arch}'
        for dtype in TYPES
        for dim, levels in ((32, '1 level'), (64, '3 levels'), (32, '3 levels'), (64, '1 level'))
        for arch in ARCHS
        for kernel in KERNELS
        if everything
        or ((dtype, arch) == ('bf16', 90) and (dim, levels) in ((32, '1 level'), (64, '3 levels')))
    ]


def build(name: str) -> CompiledKernel:
    """The compiled kernel of a variant, as the op launches it."""
    kernel, rest = name.split('/', 1)
    return _launched(rest)[kernel]


@functools.cache
def _launched(case: str) -> dict[str, CompiledKernel]:
    """The launches of a forward and a backward pass."""
    dtype, dim, levels, arch = case.split('/')
    shapes, new = LEVELS[levels], {'dtype': TYPES[dtype], 'requires_grad': True}
    points = (2, 64, 2, len(shapes), 4)
    value = torch.zeros(2, sum(h * w for h, w in shapes), 2, int(dim), **new)
    leaves = [value, torch.zeros(*points, 2, **new), torch.zeros(points, **new)]
    centres = torch.zeros(1, 64, len(shapes), 2)
    found = {}

    def instead(kernel: object, compiled: CompiledKernel, *_: object) -> None:
        found[kernel.__name__.strip('_')] = compiled

    with compiled_for(int(arch.removeprefix('sm_')), instead):
        output = deform_attn_fused(leaves[0], shapes, centres, *leaves[1:], backend='triton')
        torch.autograd.grad(output, leaves, torch.zeros_like(output))
    return found


if __name__ == '__main__':
    sys.exit(command(__doc__, TABLE, variants, build))
