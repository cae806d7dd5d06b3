"""Compiles the kernels of inner steps and convolutions for GPUs that need not be there, and counts.

    export PYTHONPATH=tools/dev/kernel_benchmarks                    # for kernel_launches.py
    python tools/dev/kernel_benchmarks/aot/ttt_glu_aot.py            # compare with the table
    python tools/dev/kernel_benchmarks/aot/ttt_glu_aot.py --update   # write the table
    python tools/dev/kernel_benchmarks/aot/ttt_glu_aot.py --update --only ttt_mlp

The table, ttt_glu_aot.json, is by Triton version, which brings its assembler; table.py counts what
is in it, and tests/kernels/test_inner_steps_aot.py holds the kernels to it.
"""

import itertools
import os
import sys
from pathlib import Path

if __name__ == '__main__':
    # Before Triton is imported: the interpreter compiles nothing, and a cache measures nothing.
    os.environ.pop('TRITON_INTERPRET', None)
    os.environ.setdefault('TRITON_ALWAYS_COMPILE', '1')

import torch
import triton
from kernel_launches import compiled_for
from table import TYPES, command
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TABLE = Path(__file__).with_suffix('.json')
ARCHS = (80, 89, 90)
KERNELS = ('step', 'read', 'read_backward', 'step_backward')
# Tensors in the dtype of the tokens; all others are in that of the inner weights.
TOKENS = {'q', 'k', 'v', 'o', 'do', 'dq', 'dk', 'dv', 'weights', 'stepped', 'j'}
TOKENS |= {'x', 'y', 'z', 'dx', 'dy', 'dz'}
INTEGERS = {'N', 'H', 'D', 'h', 'w', 'T', 'R', 'C', 'reverse_mask', 'span', 'splits', 'divisor'}
# Inner models of ttt_mlp.
MODELS = {
    'ttt_mlp': {'GATED': False, 'L2': False},
    'ttt_mlp_l2': {'GATED': False, 'L2': True},
    'ttt_mlp_swiglu': {'GATED': True, 'L2': False},
    'ttt_mlp_swiglu_l2': {'GATED': True, 'L2': True},
}


def variants(everything: bool) -> list[str]:
    """Names such as 'ttt_glu/step/bf16/64/sm_90'.

    Not everything: what takes a minute on one core. Every kernel in bf16 on one architecture, and
    the heaviest ones elsewhere.
    """
    names = []
    for op in ('ttt_glu', 'ttt_dwconv', *MODELS):
        for kernel in KERNELS:
            if op.endswith('_l2') and not kernel.startswith('step'):
                continue  # as for the other loss
            for dtype in TYPES:
                for dim in (64, 32):
                    if op in MODELS and not (
                        (dtype == 'bf16' and (dim == 64 or op == 'ttt_mlp_swiglu'))
                        or (dtype == 'fp16' and dim == 64 and op == 'ttt_mlp_swiglu')
                        or (dtype == 'fp32' and op.startswith('ttt_mlp_swiglu'))
                    ):
                        continue  # T⁵ has heads of 64 channels, and SwiGLU
                    for arch in ARCHS:
                        if (dtype, dim, op, arch) == ('fp32', 64, 'ttt_glu', 89):
                            continue  # runs as the reference
                        main = dtype == 'bf16' and dim == 64 and arch == 90
                        main = main and op not in ('ttt_mlp', 'ttt_mlp_l2')
                        heavy = op == 'ttt_glu' and kernel in ('step', 'step_backward')
                        other = heavy and (
                            (dtype == 'bf16' and dim == 64 and arch == 80)
                            or (dtype == 'bf16' and dim == 32 and arch == 90)
                            or (dtype == 'fp32' and dim == 64 and arch == 90 and kernel == 'step')
                        )
                        if everything or main or other:
                            names.append(f'{op}/{kernel}/{dtype}/{dim}/sm_{arch}')
    for kernel, dtype, arch in itertools.product(('forward', 'backward'), TYPES, ARCHS):
        if everything or (dtype, arch) == ('bf16', 90):
            names.append(f'causal_conv/{kernel}/{dtype}/64/sm_{arch}')
    return names


def build(name: str):
    """The compiled kernel of a variant, with the options that kernel.py launches it with."""
    from ttt_kernels import _launch, _stencil
    from ttt_kernels.causal_conv import kernel as convolution
    from ttt_kernels.ttt_dwconv import kernel as dwconv
    from ttt_kernels.ttt_glu import kernel as glu
    from ttt_kernels.ttt_mlp import kernel as mlp

    op, kind, dtype, dim, arch = name.split('/')
    with compiled_for(int(arch.removeprefix('sm_')), lambda *_: None):
        name = 'ttt_mlp' if op in MODELS else op
        gpu = _launch.gpu(name, torch.empty(0, dtype=TYPES[dtype]))
    if op == 'ttt_glu':
        function = getattr(glu, f'_{kind}')
        options = {**glu.config(kind, TYPES[dtype], int(dim), gpu), 'D': int(dim)}
    elif op in MODELS:
        function = getattr(mlp, f'_{kind}')
        options = mlp.config(kind, TYPES[dtype], int(dim), MODELS[op]['L2'], gpu)
        options |= {**MODELS[op], 'D': int(dim)}
    elif op == 'causal_conv':
        function = getattr(convolution, f'_{kind}')
        options = {**convolution.config(kind, int(dim)), 'TAPS': 4, 'BOTH': True}
    else:
        function = getattr(dwconv, f'_{kind}')
        options = _stencil.config(int(dim))
    launch = {n: options.pop(n) for n in ('num_warps', 'maxnreg') if n in options}
    constants = {'DAMPING': True, **options}
    constants = {n: x for n, x in constants.items() if n in function.arg_names}
    signature, attributes = {}, {}
    for i, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument] = 'constexpr'
        elif argument.endswith('_strides'):
            signature[argument] = ('i32',) * (2 if op == 'ttt_dwconv' else 3)
            attributes |= {(i, j): [['tt.divisibility', 16]] for j in range(3)}
        elif argument in INTEGERS:
            signature[argument] = 'i32'
        elif argument == 'factor':
            signature[argument] = 'fp32'
        else:
            signature[argument] = '*' + (dtype if argument in TOKENS else 'fp32')
        # Found out by a launch: aligned pointers, strides and widths that are multiples of 16.
        width = argument in ('D', 'C') and signature[argument] == 'i32'
        if signature[argument][0] == '*' or width:
            attributes[(i,)] = [['tt.divisibility', 16]]
    return triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget('cuda', int(arch.removeprefix('sm_')), 32),
        options=launch,
    )


if __name__ == '__main__':
    sys.exit(command(__doc__, TABLE, variants, build))
