"""Shared by the compile tables: counting in machine code, comparing, the command line."""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.compiler import CompiledKernel

TYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
LOWER_IS_BETTER = ('registers', 'spills', 'shared')
Figures = dict[str, int]


def count(compiled: CompiledKernel) -> Figures:
    """Figures of a compiled kernel; those of WGMMA from its PTX, the rest from its machine code.

    registers a thread, instructions that spill (LDL, STL), bytes of shared memory, tensor-core
    instructions (HMMA), all instructions, WGMMAs, and those whose first operand is in registers.
    """
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        usage = _tool('cuobjdump', '-res-usage', file.name)
        code = _tool('nvdisasm', '-c', file.name)
    opcodes = Counter(re.findall(r'/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)', code))
    ptx = compiled.asm['ptx']
    wgmma = ptx.count('wgmma.mma_async')
    operands = re.findall(r'wgmma\.mma_async[^;{]*\{[^}]*\},\s*(\{?)', ptx)
    if len(operands) != wgmma:
        raise RuntimeError(f'{wgmma} WGMMAs in the PTX, of which {len(operands)} parsed')
    return {
        'registers': int(re.search(r'REG:(\d+)', usage)[1]),
        'spills': opcodes['LDL'] + opcodes['STL'],
        'shared': compiled.metadata.shared,
        'tensor_core': opcodes['HMMA'],
        'instructions': opcodes.total(),
        'wgmma': wgmma,
        'wgmma_registers': operands.count('{'),
    }


def _tool(name: str, flag: str, path: str) -> str:
    binary = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin' / name
    return subprocess.run(
        [str(binary), flag, path], check=True, capture_output=True, text=True
    ).stdout


def compare(found: dict[str, Figures], table: dict[str, Figures]) -> list[str]:
    """A line for every figure that is not the table's, '+' in front where it is a worse one."""
    lines = []
    for name, figures in found.items():
        for figure in LOWER_IS_BETTER:
            new, old = figures[figure], table[name][figure]
            if new != old:
                lines.append(f'{"+" if new > old else "-"} {name}: {figure} {old} → {new}')
    return lines


def command(
    doc: str,
    path: Path,
    variants: Callable[[bool], list[str]],
    build: Callable[[str], CompiledKernel],
    count: Callable[[CompiledKernel], Figures] = count,
) -> int:
    """Compares the variants that it builds with the table at `path`, or writes it.

    Args:
        doc: Its first line describes the command.
        path: JSON: figures by Triton version, which brings its assembler, and variant.
        variants: Names of all variants, or of the few that are compiled by default.
        build: The compiled kernel of a variant.
        count: Its figures.

    Returns:
        The exit status: 1 where something got worse.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument('--update', action='store_true', help='write the table, every variant')
    parser.add_argument('--all', action='store_true', help='every variant, not a few')
    parser.add_argument('--only', default='', help='variants whose names start with this')
    parser.add_argument('--out', type=Path, help='also write what was found, as JSON')
    args = parser.parse_args()
    found = {}
    names = variants(args.update or args.all)
    for name in (name for name in names if name.startswith(args.only)):
        found[name] = count(build(name))
        print(name, *(f'{key} {value}' for key, value in found[name].items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps({'triton': triton.__version__, 'found': found}))
    tables = json.loads(path.read_text()) if path.exists() else {}
    if args.update:
        kept = tables.get(triton.__version__, {}) | found
        tables[triton.__version__] = {name: kept[name] for name in names if name in kept}
        lines = [
            f' {json.dumps(version)}: {{\n'
            + ',\n'.join(f'  {json.dumps(n)}: {json.dumps(f)}' for n, f in table.items())
            + '\n }'
            for version, table in sorted(tables.items())
        ]
        path.write_text('{\n' + ',\n'.join(lines) + '\n}\n')
        return 0
    if triton.__version__ not in tables:
        print(f'no table for Triton {triton.__version__}; --update writes one')
        return 0
    changes = compare(found, tables[triton.__version__])
    print(*changes, sep='\n')
    return int(any(line.startswith('+') for line in changes))
