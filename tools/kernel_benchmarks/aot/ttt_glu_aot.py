"""Compiles the kernels of the inner steps for GPUs that need not be there, and counts.

    python tools/kernel_benchmarks/aot/ttt_glu_aot.py            # compare with the committed table
    python tools/kernel_benchmarks/aot/ttt_glu_aot.py --update   # write the table anew
    python tools/kernel_benchmarks/aot/ttt_glu_aot.py --update --only ttt_mlp

The table, ttt_glu_aot.json, is like that of ttt_linear_aot.py, whose counting it shares;
tests/kernels/test_inner_steps_aot.py holds the kernels to it.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

if __name__ == '__main__':
    # Before Triton is imported: the interpreter compiles nothing, and a cache measures nothing.
    os.environ.pop('TRITON_INTERPRET', None)
    os.environ['TRITON_ALWAYS_COMPILE'] = '1'

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ttt_linear_aot import TYPES, compare, count

TABLE = Path(__file__).with_suffix('.json')
ARCHS = (80, 89, 90)
KERNELS = ('step', 'read', 'read_backward', 'step_backward')
# Tensors in the dtype of the tokens; all others are in that of the inner weights.
TOKENS = {'q', 'k', 'v', 'o', 'do', 'dq', 'dk', 'dv', 'weights', 'stepped', 'j'}
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
                    if dtype == 'fp32' and op == 'ttt_glu' and dim == 64:
                        continue  # runs as the reference
                    if op in MODELS and (dtype != 'bf16' or (op != 'ttt_mlp_swiglu' and dim == 32)):
                        continue  # fp16 comes out as bf16 does, and T⁵ has heads of 64 channels
                    for arch in ARCHS:
                        main = dtype == 'bf16' and dim == 64 and arch == 90
                        main = main and op not in ('ttt_mlp', 'ttt_mlp_l2')
                        heavy = op == 'ttt_glu' and kernel in ('step', 'step_backward')
                        other = heavy and (
                            (dtype == 'bf16' and dim == 64 and arch == 80)
                            or (dtype == 'bf16' and dim == 32 and arch == 90)
                        )
                        if everything or main or other:
                            names.append(f'{op}/{kernel}/{dtype}/{dim}/sm_{arch}')
    return names


def build(name: str):
    """The compiled kernel of a variant, with the options that kernel.py launches it with."""
    from ttt_kernels.ttt_dwconv import kernel as dwconv
    from ttt_kernels.ttt_glu import kernel as glu
    from ttt_kernels.ttt_mlp import kernel as mlp

    op, kind, dtype, dim, arch = name.split('/')
    if op == 'ttt_glu':
        function = getattr(glu, f'_{kind}')
        options = {**glu.config(kind, TYPES[dtype]), 'D': int(dim)}
    elif op in MODELS:
        function = getattr(mlp, f'_{kind}')
        little = arch == 'sm_89'
        options = {**mlp.config(kind, MODELS[op]['L2'], little), **MODELS[op], 'D': int(dim)}
    else:
        function = getattr(dwconv, f'_{kind}')
        options = dwconv.config(int(dim))
    warps = options.pop('num_warps')
    constants = {'DAMPING': True, **options}
    constants = {n: x for n, x in constants.items() if n in function.arg_names}
    signature, attributes = {}, {}
    for i, argument in enumerate(function.arg_names):
        stride = re.fullmatch(r'(\w+)_[bnh]', argument)
        if argument in constants:
            signature[argument] = 'constexpr'
        elif stride or argument in ('N', 'H', 'D', 'h', 'w', 'span', 'splits', 'divisor'):
            signature[argument] = 'i32'
        elif argument == 'factor':
            signature[argument] = 'fp32'
        else:
            signature[argument] = '*' + (dtype if argument in TOKENS else 'fp32')
        # What a launch finds out: aligned pointers, strides and widths that are multiples of 16.
        if (
            signature[argument].startswith('*')
            or stride
            or (argument == 'D' and signature[argument] == 'i32')
        ):
            attributes[(i,)] = [['tt.divisibility', 16]]
    return triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget('cuda', int(arch.removeprefix('sm_')), 32),
        options={'num_warps': warps},
    )


def figures(compiled) -> dict[str, int]:
    """Those of `ttt_linear_aot.count`, and WGMMAs whose first operand is in registers."""
    operands = re.findall(r'wgmma\.mma_async[^;{]*\{[^}]*\},\s*(\{?)', compiled.asm['ptx'])
    found = count(compiled)
    if len(operands) != found['wgmma']:
        raise RuntimeError(f'{found["wgmma"]} WGMMAs in the PTX, of which {len(operands)} parsed')
    return {**found, 'wgmma_registers': operands.count('{')}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--update', action='store_true', help='write the table, every variant')
    parser.add_argument('--all', action='store_true', help='every variant, not a minute of them')
    parser.add_argument('--only', default='', help='variants whose names start with this')
    args = parser.parse_args()
    found = {}
    names = variants(args.update or args.all)
    for name in (name for name in names if name.startswith(args.only)):
        found[name] = figures(build(name))
        print(name, *(f'{key} {value}' for key, value in found[name].items()), flush=True)
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if args.update:
        kept = tables.get(triton.__version__, {}) | found
        tables[triton.__version__] = {name: kept[name] for name in names if name in kept}
        lines = [
            f' {json.dumps(version)}: {{\n'
            + ',\n'.join(f'  {json.dumps(n)}: {json.dumps(f)}' for n, f in table.items())
            + '\n }'
            for version, table in sorted(tables.items())
        ]
        TABLE.write_text('{\n' + ',\n'.join(lines) + '\n}\n')
        return 0
    if triton.__version__ not in tables:
        print(f'no table for Triton {triton.__version__}; --update writes one')
        return 0
    changes = compare(found, tables[triton.__version__])
    print(*changes, sep='\n')
    return int(any(line.startswith('+') for line in changes))


if __name__ == '__main__':
    sys.exit(main())
