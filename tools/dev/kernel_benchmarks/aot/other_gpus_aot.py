"""Compiles the ops' launches for GPUs on which the project never ran, and counts.

    export PYTHONPATH=tools/dev/kernel_benchmarks                        # for predict.py
    python tools/dev/kernel_benchmarks/aot/other_gpus_aot.py             # compare with the table
    python tools/dev/kernel_benchmarks/aot/other_gpus_aot.py --update    # write the table

The launches are those of predict.py's calls, with one GPU's plans and limits. The table,
other_gpus_aot.json, is by Triton version. That a kernel compiles says nothing about what it
computes there.
"""

import functools
import os
import re
import sys
from pathlib import Path

if __name__ == '__main__':
    # Before Triton is imported: the interpreter compiles nothing, and a cache measures nothing.
    os.environ.pop('TRITON_INTERPRET', None)
    os.environ.setdefault('TRITON_ALWAYS_COMPILE', '1')

import predict
import torch
from kernel_launches import compiled_for
from table import TYPES, Figures, command, count
from triton.compiler import CompiledKernel

TABLE = Path(__file__).with_suffix('.json')
GPUS: dict[str, int | str] = {'sm_100': 100, 'sm_120': 120, 'gfx942': 'gfx942'}
# Calls of predict.py, and their kernels, forward and backward.
SCAN = ('forward_scan', 'backward_query', 'backward_chain', 'backward_key')
STEP = ('step', 'read', 'read_backward', 'step_backward')
CALLS = {
    'ttt_linear whole d 64': SCAN,
    'causal_conv, two of 4 taps': ('forward', 'backward'),
    'ttt_glu d 64': (*STEP, 'step_gradients', 'add_up'),
    'ttt_dwconv d 64': STEP,
    'ttt_mlp SwiGLU d 64': (*STEP, 'add_up', 'relative'),
    'deform_attn d 64, 3 levels': ('forward', 'backward_points', 'backward_value'),
}
# Products of fp32 are made another way on AMD.
FP32 = ('ttt_linear whole d 64', 'ttt_mlp SwiGLU d 64')
# Compiled by `make test`.
FEW = ('gfx942/fp32/ttt_linear whole d 64', 'sm_120/bf16/causal_conv, two of 4 taps')


def variants(everything: bool) -> list[str]:
    """Names such as 'gfx942/bf16/ttt_glu d 64/step'."""
    calls = [f'{gpu}/bf16/{call}' for gpu in GPUS for call in CALLS]
    calls += [f'gfx942/fp32/{call}' for call in FP32]
    return [
        f'{call}/{kernel}'
        for call in calls
        if everything or call in FEW
        for kernel in CALLS[call.split('/')[2]]
    ]


def build(name: str) -> CompiledKernel:
    """The compiled kernel of a variant, as the op launches it."""
    call, kernel = name.rsplit('/', 1)
    return _launched(call)[kernel]


@functools.cache
def _launched(call: str) -> dict[str, CompiledKernel]:
    """The launches of a forward and a backward pass."""
    gpu, dtype, case = call.split('/')
    found: dict[str, CompiledKernel] = {}

    def instead(kernel: object, compiled: CompiledKernel, *_: object) -> None:
        found[kernel.__name__.strip('_')] = compiled

    with compiled_for(GPUS[gpu], instead):
        run, leaves = predict.CASES[case]()
        for leaf in leaves:
            if leaf.dtype == torch.bfloat16:
                leaf.data = leaf.data.to(TYPES[dtype])
        output = run()
        torch.autograd.grad(output, leaves, torch.zeros_like(output))
    return found


def count_any(compiled: CompiledKernel) -> Figures:
    """`table.count`; of a kernel for AMD its own figures.

    registers of a thread, of both kinds; bytes of a thread's that went to memory; bytes of LDS;
    instructions of the matrix cores.
    """
    if 'amdgcn' not in compiled.asm:
        return count(compiled)
    code = compiled.asm['amdgcn']

    def figure(name: str) -> int:
        return int(re.search(rf'\.{name}:\s+(\d+)', code)[1])

    return {
        'registers': figure('vgpr_count'),
        'spills': figure('private_segment_fixed_size'),
        'shared': compiled.metadata.shared,
        'tensor_core': code.count('v_mfma'),
    }


if __name__ == '__main__':
    sys.exit(command(__doc__, TABLE, variants, build, count_any))
