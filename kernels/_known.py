"""Table of what the Triton kernels do by GPU, Triton, op and dtype: runs, refused, checked.

The ops read it, docs/kernels.md shows it, and `make gpu` names the rows that it settles.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

Version = tuple[int, ...]

RUNS, REFUSED, CHECKED = 'runs', 'refused', 'checked'
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
# Ops whose products are WGMMA and tcgen05 where the GPU has them, in bf16 and fp16.
_PRODUCTS = ('ttt_glu', 'ttt_mlp')
_HALF = ('bf16', 'fp16')

OLD, A100, SM_8, HOPPER, BLACKWELL, SM_12, AMD = (
    'below 8.0',
    '8.0 (A100)',
    '8.6 to 8.9 (RTX 30 and 40, L40S)',
    '9.0 (H100, H200)',
    '10.x (B200, B300)',
    '11.x, 12.x (RTX 50)',
    'AMD',
)


class Row(NamedTuple):
    """One verdict.

    Attributes:
        gpu: Name of a range of compute capabilities.
        least, below: Range of Triton versions; () leaves an end open.
        ops: Names of ops; () is every op.
        dtypes: Dtypes of the tokens.
        verdict: RUNS where the GPU tests agree with fp64 on such a GPU; REFUSED; or CHECKED: each
            machine compares it with the reference before its first use (`_check`).
        why: Reports of faults, or where it ran.
        one_stage: Loops with WGMMA or tcgen05 are not software-pipelined.
        mma_sync: `_step_backward` has no WGMMA.
    """

    gpu: str
    least: Version
    below: Version
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    verdict: str
    why: str
    one_stage: bool = False
    mma_sync: bool = False

    @property
    def triton(self) -> str:
        """The versions in words."""
        bounds = (('≥', self.least), ('<', self.below))
        words = [f'{sign} {".".join(map(str, v))}' for sign, v in bounds if v]
        return ', '.join(words) or 'any'


_ALL = tuple(DTYPES)
_ON_AN_H100 = 'an H100 with torch 2.11.0, Triton 3.6.0, driver 580.159'
_NO_WGMMA = (
    '`_step_backward` of 64 channels has no WGMMA: with it ptxas 12.8 made wrong gradients of k '
    'and w1 on an H100, and ptxas 13.5 right ones'
)
_ONE_STAGE = 'one stage, because with two WGMMA reads copies with no proxy fence between'
# The first row that matches decides; where none does, the kernel is checked.
ROWS = (
    Row(OLD, (), (), (), _ALL, REFUSED, 'the kernels need compute capability 8.0 or more'),
    Row(
        HOPPER,
        (),
        (3, 7),
        ('ttt_mlp',),
        _HALF,
        RUNS,
        f'{_ON_AN_H100}; one stage, as for `ttt_glu`; {_NO_WGMMA}',
        one_stage=True,
        mma_sync=True,
    ),
    Row(
        HOPPER,
        (),
        (3, 7, 1),
        ('ttt_mlp',),
        _HALF,
        CHECKED,
        f'one stage; {_NO_WGMMA}',
        one_stage=True,
        mma_sync=True,
    ),
    Row(HOPPER, (), (), ('ttt_mlp',), _HALF, CHECKED, _NO_WGMMA, mma_sync=True),
    Row(
        HOPPER,
        (),
        (3, 7),
        ('ttt_glu',),
        _HALF,
        RUNS,
        f'{_ON_AN_H100}; {_ONE_STAGE} (Triton 9610)',
        one_stage=True,
    ),
    Row(HOPPER, (), (3, 7, 1), ('ttt_glu',), _HALF, CHECKED, _ONE_STAGE, one_stage=True),
    Row(
        HOPPER,
        (),
        (3, 7),
        ('ttt_linear',),
        _ALL,
        CHECKED,
        'removes the means of Z and U: another form of that mend ran on an H100, this one has not',
    ),
    Row(HOPPER, (), (3, 7), (), _ALL, RUNS, _ON_AN_H100),
    Row(
        BLACKWELL,
        (),
        (3, 8),
        _PRODUCTS,
        _HALF,
        REFUSED,
        'Triton before 3.8 miscompiles tcgen05 in such loops (Triton 9615, 9871, 10590)',
    ),
    Row(
        BLACKWELL,
        (3, 8),
        (3, 9),
        ('ttt_mlp',),
        _HALF,
        CHECKED,
        'one stage, because with two tcgen05 reads copies with no proxy fence between',
        one_stage=True,
    ),
)


def gpu_of(capability: tuple[int, int]) -> str:
    """The table's name of a GPU. AMD numbers its capabilities differently."""
    if torch.version.hip:
        return AMD
    if capability < (8, 0):
        return OLD
    major, minor = capability
    return {8: A100 if minor == 0 else SM_8, 9: HOPPER, 10: BLACKWELL}.get(major, SM_12)


def version_of(text: str) -> Version:
    """Leading numbers of a version such as '3.6.0+git1234'."""
    match = re.match(r'\d+(\.\d+)*', text)
    return tuple(map(int, match[0].split('.'))) if match else ()


@functools.lru_cache(maxsize=1024)
def row(op: str, dtype: torch.dtype, capability: tuple[int, int], triton: str) -> Row | None:
    """Row of an op with tokens of `dtype`; None where nothing is known."""
    gpu, version = gpu_of(capability), version_of(triton)
    for entry in ROWS:
        if (
            entry.gpu == gpu
            and entry.least <= version
            and (not entry.below or version < entry.below)
            and (not entry.ops or op in entry.ops)
            and dtype in (DTYPES[name] for name in entry.dtypes)
        ):
            return entry
    return None


def refusals(
    op: str, capability: tuple[int, int], triton: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Dtypes in which an op's kernel is refused, and the reason."""
    reasons: dict[str, list[str]] = {}
    for name, dtype in DTYPES.items():
        entry = row(op, dtype, capability, triton)
        if entry is not None and entry.verdict == REFUSED:
            reasons.setdefault(entry.why, []).append(name)
    for why, names in reasons.items():
        yield tuple(names), why


def table() -> str:
    """All rows in Markdown."""
    lines = ['| GPU | Triton | ops | dtypes | | why |', '|---|---|---|---|---|---|']
    for entry in ROWS:
        ops = ', '.join(f'`{op}`' for op in entry.ops) or 'all' + ' others' * any(
            other.ops and other.gpu == entry.gpu for other in ROWS
        )
        cells = (entry.gpu, entry.triton, ops, ', '.join(entry.dtypes), entry.verdict, entry.why)
        lines.append('| ' + ' | '.join(cells) + ' |')
    lines.append('| any other | any other | all | fp32, bf16, fp16 | checked | |')
    return '\n'.join(lines)
