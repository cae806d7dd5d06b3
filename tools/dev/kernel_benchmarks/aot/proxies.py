"""Finds products that may read shared memory before a proxy fence has shown them what is there.

WGMMA and tcgen05.mma read their operands by the asynchronous proxy (PTX ISA, "Async Proxy" of
wgmma, "Shared Memory Accesses" of tcgen05). What threads wrote by st.shared, stmatrix or cp.async
went through the generic one: `fence.proxy.async` must stand between, for copies after their wait.

    export PYTHONPATH=tools/dev/kernel_benchmarks                # for kernel_launches.py
    python tools/dev/kernel_benchmarks/aot/proxies.py            # kernels with such products
    python tools/dev/kernel_benchmarks/aot/proxies.py --update   # write them to proxies.json

The table is by Triton version; tests/kernels/test_proxies.py holds the kernels to it.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix('.json')

_WRITE = re.compile(r'(?:st|red|atom)\.(?:\w+\.)*shared|stmatrix\.')
_COPY = re.compile(r'cp\.async\.c[ag]\.')
_WAIT = re.compile(r'cp\.async\.wait_(?:group|all)')
_FENCE = re.compile(r'fence\.proxy\.async')
_READ = re.compile(
    r'wgmma\.mma_async|tcgen05\.(?:mma|cp)\b|cp\.(?:reduce\.)?async\.bulk\.(?!commit|wait)'
)
_JUMP = re.compile(r'(?:@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+)')


class Found(NamedTuple):
    """Products of a kernel that read shared memory, and lines of the PTX with those that may read
    before a fence: what copies brought, and what stores wrote."""

    reads: int
    copies: list[int]
    stores: list[int]


class _State(NamedTuple):
    """States that some path to an instruction may have."""

    flying: bool  # a copy was issued
    copied: bool  # one was waited for, with no fence since
    stored: bool  # something was stored, with no fence since

    def join(self, other: '_State') -> '_State':
        return _State(*(x or y for x, y in zip(self, other, strict=True)))


def _after(text: str, state: _State) -> _State:
    if _FENCE.match(text):
        return state._replace(copied=False, stored=False)
    if _WRITE.match(text):
        return state._replace(stored=True)
    if _COPY.match(text):
        return state._replace(flying=True)
    if _WAIT.match(text) and state.flying:
        return state._replace(copied=True)
    return state


def _statements(ptx: str) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Instructions with the lines on which they begin, and places of labels among them."""
    found: list[tuple[int, str]] = []
    labels: dict[str, int] = {}
    text, first = '', 0
    for number, line in enumerate(ptx.splitlines(), 1):
        line = line.partition('//')[0].strip()
        if label := re.fullmatch(r'(\$\w+):', line):
            labels[label[1]] = len(found)
        elif line and not line.startswith('.'):
            first = first if text else number
            text += ' ' + line
            *whole, text = text.split(';')
            found += [(first, part.strip(' {}\t')) for part in whole]
            text = text.strip(' {}\t')
    return found, labels


def unfenced_reads(ptx: str) -> Found:
    """Follows every way through a kernel's PTX.

    Which bytes an instruction touches is not looked at: a write of other bytes counts too.
    """
    statements, labels = _statements(ptx)
    states: list[_State | None] = [None] * (len(statements) + 1)
    ways = [(0, _State(False, False, False))]
    while ways:
        at, state = ways.pop()
        known = states[at]
        merged = state if known is None else known.join(state)
        if merged == known or at == len(statements):
            continue
        states[at] = merged
        text = statements[at][1]
        plain = re.sub(r'^@!?%\w+\s+', '', text)
        if jump := _JUMP.match(text):
            ways.append((labels[jump[1]], merged))
            if not text.startswith('@'):
                continue
        elif plain.startswith('ret') and plain == text:
            continue
        ways.append((at + 1, _after(plain, merged)))
    reads = [
        (line, state)
        for (line, text), state in zip(statements, states, strict=False)
        if state is not None and _READ.match(re.sub(r'^@!?%\w+\s+', '', text))
    ]
    return Found(
        len(reads),
        [line for line, state in reads if state.copied],
        [line for line, state in reads if state.stored],
    )


def variants() -> list[str]:
    """Kernels with WGMMA and tcgen05, as names of ttt_glu_aot.py: in bf16, which is fp16's code."""
    from ttt_glu_aot import KERNELS, MODELS

    names = [f'ttt_glu/{kernel}/bf16/{dim}' for kernel in KERNELS for dim in (64, 32)]
    names += [
        f'{model}/{kernel}/bf16/64'
        for model in MODELS
        for kernel in KERNELS
        if not model.endswith('_l2') or kernel.startswith('step')  # others as for the other loss
    ]
    return [f'{name}/sm_{arch}' for arch in (90, 100) for name in names]


def walk(name: str) -> dict[str, int]:
    """Figures of a variant, as the op launches it."""
    from ttt_glu_aot import build

    found = unfenced_reads(build(name).asm['ptx'])
    return {'reads': found.reads, 'copies': len(found.copies), 'stores': len(found.stores)}


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--update', action='store_true', help='write the table')
    args = parser.parse_args()
    found = {}
    for name in variants():
        found[name] = walk(name)
        print(name, *(f'{key} {value}' for key, value in found[name].items()), flush=True)
    if args.update:
        tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        tables[triton.__version__] = found
        lines = [
            f' {json.dumps(version)}: {{\n'
            + ',\n'.join(f'  {json.dumps(n)}: {json.dumps(f)}' for n, f in table.items())
            + '\n }'
            for version, table in sorted(tables.items())
        ]
        TABLE.write_text('{\n' + ',\n'.join(lines) + '\n}\n')
    return 0


if __name__ == '__main__':
    os.environ.pop('TRITON_INTERPRET', None)  # the interpreter compiles nothing
    sys.exit(main())
