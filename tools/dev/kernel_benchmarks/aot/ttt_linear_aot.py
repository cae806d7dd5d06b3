"""Compiles the TTT-linear kernels for GPUs that need not be there, and counts what came out.

    python tools/dev/kernel_benchmarks/aot/ttt_linear_aot.py            # compare with the table
    python tools/dev/kernel_benchmarks/aot/ttt_linear_aot.py --update   # write the table

The table, ttt_linear_aot.json, is by Triton version, which brings its assembler; table.py counts
what is in it. tests/kernels/test_ttt_linear_aot.py holds the kernels to it.
"""

import os
import sys
from pathlib import Path

if __name__ == '__main__':
    # Before Triton is imported: its interpreter and its cache would compile nothing.
    os.environ.pop('TRITON_INTERPRET', None)
    os.environ.setdefault('TRITON_ALWAYS_COMPILE', '1')

import triton
from table import TYPES, command
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TABLE = Path(__file__).with_suffix('.json')
ARCHS = (80, 90)
# Name in the table: function, its options, and whether programs share a multiprocessor's registers.
KERNELS = {
    'forward_fused': ('forward_scan', {'QUERY': True, 'KEEP': False}, True),
    'forward_fused_kept': ('forward_scan', {'QUERY': True, 'KEEP': True}, True),
    'forward_scan': ('forward_scan', {'QUERY': False, 'KEEP': True}, False),
    'forward_output': ('forward_output', {}, True),
    'backward_query': ('backward_query', {}, False),
    'backward_chain': ('backward_chain', {}, False),
    'backward_key': ('backward_key', {}, False),
}
# The same with mini-batches of several chunks.
KERNELS |= {
    f'{name}_b64': (function, {**options, 'SIZE': 64}, shared)
    for name, (function, options, shared) in KERNELS.items()
}
# In mini-batches of one chunk.
KERNELS['backward_chain_shared'] = ('backward_chain', {}, True)
# Compiled by default: all in bf16, and the heaviest ones in other types.
FEW = {(kernel, 'bf16', 64) for kernel in KERNELS if not kernel.endswith('_b64')}
FEW |= {('backward_query', 'fp32', 64), ('forward_fused_kept', 'bf16', 128)}
FEW |= {('backward_key_b64', 'bf16', 64)}
# Tensors in the dtype of the tokens; all others are in that of the state.
TOKENS = {'q', 'k', 'v', 'o', 'z_kept', 'g', 'do', 'tiles', 'dq', 'dk', 'dv'}


def variants(everything: bool) -> list[str]:
    """Names such as 'forward_fused/bf16/64/sm_90'.

    Every kernel on every architecture, and in the other dtypes and sizes on sm_90; larger
    mini-batches in bf16 alone. Not everything: what takes a minute on one core.
    """
    names = []
    for kernel in KERNELS:
        for arch in ARCHS:
            for dim in (64, 32, 128):
                for dtype in TYPES:
                    main = dtype == 'bf16' and dim == 64
                    if everything:
                        wanted = main or (arch == 90 and not kernel.endswith('_b64'))
                    else:
                        wanted = arch == 90 and (kernel, dtype, dim) in FEW
                    if wanted:
                        names.append(f'{kernel}/{dtype}/{dim}/sm_{arch}')
    return names


def build(name: str):
    """The compiled kernel of a variant, with the options that kernel.py launches it with."""
    from ttt_kernels.ttt_linear import _backward_kernels, _forward_kernels, kernel
    from ttt_kernels.ttt_linear._tiles import VARYING

    kind, dtype, dim, arch = name.split('/')
    function, options, shared = KERNELS[kind]
    module = _forward_kernels if function.startswith('forward') else _backward_kernels
    function = getattr(module, function)
    half = dtype != 'fp32'
    constants = {
        'D': int(dim),
        'WIDTH': int(dim),
        'SIZE': 16,
        **options,
        'HAS_SCALE': True,
        'PRECISION': 'ieee' if half else 'tf32x3',
    }
    signature, attributes = {}, {}
    for i, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument] = 'constexpr'
        elif argument.endswith('_strides'):
            signature[argument] = ('i32',) * 4
        elif argument in VARYING:
            signature[argument] = 'i32'
        elif argument == 'eps':
            signature[argument] = 'fp32'
        else:
            low = argument in TOKENS and (argument, dtype) != ('z_kept', 'fp16')
            signature[argument] = '*' + (dtype if low else 'fp32')
        # Found out by a launch: aligned pointers, and strides that are multiples of 16.
        if signature[argument][0] == '*':
            attributes[(i,)] = [['tt.divisibility', 16]]
        elif argument.removesuffix('_strides') in TOKENS:
            attributes |= {(i, j): [['tt.divisibility', 16]] for j in range(4)}
    return triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget('cuda', int(arch.removeprefix('sm_')), 32),
        options={
            'num_warps': int(dim) // kernel.CHUNK,
            'maxnreg': kernel.registers(TYPES[dtype], int(dim), shared),
        },
    )


if __name__ == '__main__':
    sys.exit(command(__doc__, TABLE, variants, build))
