"""Table of what the Triton kernels do by GPU, Triton, op and dtype: runs, refused, checked.

The ops read it.
"""

import re
from typing import NamedTuple

import torch

Version = tuple[int, ...]

RUNS, REFUSED, CHECKED = 'runs', 'refused', 'checked'
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
_HALF = ('bf16', 'fp16')

OLD, HOPPER, BLACKWELL, OTHER = 'below 8.0', '9.0 (H100, H200)', '10.x (B200, B300)', 'any other'


class Row(NamedTuple):
    """One verdict.

    Attributes:
        gpu: Name of a range of compute capabilities.
        verdict: RUNS where the GPU tests agree with fp64 on such a GPU; REFUSED; or CHECKED: each
            machine compares it with the reference before its first use (`_check`).
        why: Reports of faults, or where it ran.
        ops: Names of ops; () is every op.
        dtypes: Dtypes of the tokens.
        least, below: Range of Triton versions; () leaves an end open.
        one_stage: Loops with WGMMA or tcgen05 are not software-pipelined.
        mma_sync: `_step_backward` has no WGMMA.
    """

    gpu: str
    verdict: str
    why: str
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = tuple(DTYPES)
    least: Version = ()
    below: Version = ()
    one_stage: bool = False
    mma_sync: bool = False


_GLU, _MLP = ('ttt_glu',), ('ttt_mlp',)
_ON_AN_H100 = 'an H100 with torch 2.11.0, Triton 3.6.0, driver 580.159'
_NO_WGMMA = (
    '`_step_backward` of 64 channels has no WGMMA: with it ptxas 12.8 made wrong gradients of k '
    'and w1 on an H100, and ptxas 13.5 right ones'
)
_UNFENCED = 'one stage, because with two {} reads copies with no proxy fence between'
_MEANS = 'removes the means of Z and U: another form of that mend ran on an H100, this one has not'
_TCGEN05 = 'Triton before 3.8 miscompiles tcgen05 in such loops (Triton 9615, 9871, 10590)'
_MLP_RAN = f'{_ON_AN_H100}; one stage, as for `ttt_glu`; {_NO_WGMMA}'
_GLU_RAN = f'{_ON_AN_H100}; {_UNFENCED.format("WGMMA")} (Triton 9610)'
_BOTH = {'one_stage': True, 'mma_sync': True}
# The first row that matches decides; where none does, the kernel is checked.
ROWS = (
    Row(OLD, REFUSED, 'the kernels need compute capability 8.0 or more'),
    Row(HOPPER, RUNS, _MLP_RAN, _MLP, _HALF, below=(3, 7), **_BOTH),
    Row(HOPPER, CHECKED, f'one stage; {_NO_WGMMA}', _MLP, _HALF, below=(3, 7, 1), **_BOTH),
    Row(HOPPER, CHECKED, _NO_WGMMA, _MLP, _HALF, mma_sync=True),
    Row(HOPPER, RUNS, _GLU_RAN, _GLU, _HALF, below=(3, 7), one_stage=True),
    Row(HOPPER, CHECKED, _UNFENCED.format('WGMMA'), _GLU, _HALF, (), (3, 7, 1), one_stage=True),
    Row(HOPPER, CHECKED, _MEANS, ('ttt_linear',), below=(3, 7)),
    Row(HOPPER, RUNS, _ON_AN_H100, below=(3, 7)),
    Row(BLACKWELL, REFUSED, _TCGEN05, _GLU + _MLP, _HALF, below=(3, 8)),
    Row(BLACKWELL, CHECKED, _UNFENCED.format('tcgen05'), _MLP, _HALF, (3, 8), (3, 9), True),
)


def gpu_of(capability: tuple[int, int]) -> str:
    """The table's name of a GPU. AMD numbers its capabilities differently."""
    if torch.version.hip:
        return OTHER
    if capability < (8, 0):
        return OLD
    return {9: HOPPER, 10: BLACKWELL}.get(capability[0], OTHER)


def version_of(text: str) -> Version:
    """Leading numbers of a version such as '3.6.0+git1234'."""
    match = re.match(r'\d+(\.\d+)*', text)
    return tuple(map(int, match[0].split('.'))) if match else ()


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
