"""Table of what is known of the Triton kernels by GPU, Triton, op and dtype; the ops read it."""

import re
from typing import NamedTuple

import torch

Version = tuple[int, ...]

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
_HALF = ('bf16', 'fp16')

OLD, HOPPER, BLACKWELL, OTHER = 'below 8.0', '9.0 (H100, H200)', '10.x (B200, B300)', 'any other'


class Row(NamedTuple):
    """Known behaviour of a GPU.

    Attributes:
        gpu: Name of a range of compute capabilities.
        why: Reports of faults, or where one was seen.
        ops: Names of ops; () is every op.
        dtypes: Dtypes of the tokens.
        least, below: Range of Triton versions; () leaves an end open.
        refused: The kernels do not run. Others check themselves before their first use (`_check`).
        one_stage: Loops with WGMMA or tcgen05 are not software-pipelined.
        mma_sync: `_step_backward` has no WGMMA.
    """

    gpu: str
    why: str
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = tuple(DTYPES)
    least: Version = ()
    below: Version = ()
    refused: bool = False
    one_stage: bool = False
    mma_sync: bool = False


_GLU, _MLP = ('ttt_glu',), ('ttt_mlp',)
_NO_WGMMA = (
    '`_step_backward` of 64 channels has no WGMMA: with it ptxas 12.8 made wrong gradients of k '
    'and w1 on an H100, and ptxas 13.5 right ones'
)
_UNFENCED = 'one stage, because with two {} reads copies with no proxy fence between'
_TCGEN05 = 'Triton before 3.8 miscompiles tcgen05 in such loops (Triton 9615, 9871, 10590)'
_WGMMA = _UNFENCED.format('WGMMA') + ' (Triton 9610)'
_TO_3_7_1 = {'below': (3, 7, 1), 'one_stage': True}
# The first row that matches decides.
ROWS = (
    Row(OLD, 'the kernels need compute capability 8.0 or more', refused=True),
    Row(HOPPER, f'{_WGMMA}; {_NO_WGMMA}', _MLP, _HALF, mma_sync=True, **_TO_3_7_1),
    Row(HOPPER, _NO_WGMMA, _MLP, _HALF, mma_sync=True),
    Row(HOPPER, _WGMMA, _GLU, _HALF, **_TO_3_7_1),
    Row(BLACKWELL, _TCGEN05, _GLU + _MLP, _HALF, below=(3, 8), refused=True),
    Row(BLACKWELL, _UNFENCED.format('tcgen05'), _MLP, _HALF, (3, 8), (3, 9), one_stage=True),
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
