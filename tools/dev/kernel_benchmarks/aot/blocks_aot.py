"""Compiles the kernels of fused parts of blocks for GPUs that need not be there, and counts.

    export PYTHONPATH=tools/dev/kernel_benchmarks:tests/kernels    # for kernel_launches.py, ops.py
    python tools/dev/kernel_benchmarks/aot/blocks_aot.py            # compare with the table
    python tools/dev/kernel_benchmarks/aot/blocks_aot.py --update   # write the table

The launches come from `PARTS`, rows of tests/kernels/block_ops.py. The table, blocks_aot.json, is
by Triton version; table.py makes the counts, and tests/kernels/test_launched_aot.py compares the
kernels with it.
"""

import functools
import os
import sys
from pathlib import Path

if __name__ == '__main__':
    # Before Triton is imported: the interpreter compiles nothing, and a cache measures nothing.
    os.environ.pop('TRITON_INTERPRET', None)
    os.environ.setdefault('TRITON_ALWAYS_COMPILE', '1')

from kernel_launches import compiled_for
from kernel_testing import with_gradients
from ops import OPS
from table import TYPES, command
from triton.compiler import CompiledKernel

TABLE = Path(__file__).with_suffix('.json')
# Rows of ops.py, what they launch, and channels as the models have them.
PARTS = {
    'residual_norm': (('forward', 'backward'), 384),
    'conv_norm': (('forward', 'backward', 'residual_backward'), 384),
    'gated': (('gated', 'gated backward'), 384),
    'biased_act': (('gated', 'gated backward'), 1536),
    'gelu_conv': (('walk', 'walk backward', 'residual_backward'), 1280),
    'rotate': (('rotate', 'rotate backward'), 320),
}
ARCHS = (80, 90, 120)


def variants(everything: bool) -> list[str]:
    """Names such as 'residual_norm/384/bf16/sm_90/forward'.

    Not everything: in bf16 on sm_90.
    """
    return [
        f'{part}/{dim}/{dtype}/sm_{arch}/{kernel}'
        for part, (kernels, dim) in PARTS.items()
        for dtype in ('bf16', 'fp32')
        for arch in ARCHS
        for kernel in kernels
        if (everything and (dtype == 'bf16' or arch == 90)) or (dtype, arch) == ('bf16', 90)
    ]


def build(name: str) -> CompiledKernel:
    """The compiled kernel of a variant, as the op launches it."""
    call, kernel = name.rsplit('/', 1)
    return _launched(call)[kernel]


@functools.cache
def _launched(call: str) -> dict[str, CompiledKernel]:
    """The launches of a forward and a backward pass."""
    part, dim, dtype, arch = call.split('/')
    found: dict[str, CompiledKernel] = {}

    def instead(kernel: object, compiled: CompiledKernel, _: object, given: dict) -> None:
        backward = ' backward' if given.get('BACKWARD') else ''
        found[kernel.__name__.strip('_') + backward] = compiled

    with compiled_for(int(arch.removeprefix('sm_')), instead):
        inputs = OPS[part].make((16, 16), dim=int(dim), dtype=TYPES[dtype])
        inputs = {name: x.contiguous() for name, x in inputs.items()}
        with_gradients(OPS[part].call, inputs, (16, 16), backend='triton')
    return found


if __name__ == '__main__':
    sys.exit(command(__doc__, TABLE, variants, build))
