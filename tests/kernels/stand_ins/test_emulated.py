"""The kernels as Triton compiles them for sm_80 and sm_90, emulated, against the definitions.

What the interpreter can't show is here: bf16, tf32 and the other roundings of a GPU, layouts,
races, accesses out of bounds and reads of what nothing wrote. The calls are those of ops.py.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from emulator import emulated
from op_row import BF16, FP16, FP32
from ops import OPS

TYPES = {'bf16': BF16, 'fp16': FP16, 'fp32': FP32}
CASES = [(name, which) for name, op in OPS.items() for which in op.emulated]
# The step of a single token is divided by its own norm: one unit roundoff of the tokens moves the
# gradients of w1 and w2 by 19 and 7 %, in fp16 by 2.5 and 1.1 %.
LOOSE = {('ttt_glu', '1 × 1'): {BF16: 0.14, FP16: 0.02}}


VARIANTS = [
    pytest.param(
        *(name, which, arch, dtype),
        id=f'{name} {which}, sm_{arch}, {dtype}',
    )
    for (name, which), arch, dtype in itertools.product(CASES, (80, 90), TYPES)
]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Has torch fill every fresh tensor with NaN: what is not written cannot go unseen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(name: str, which: str, arch: int, dtype: str, late: bool = True) -> None:
    op, case = OPS[name], OPS[name].emulated[which]
    case = case._replace(sizes={'batch': 1, **case.sizes})
    tolerance = {**op.kernel_tolerance, **LOOSE.get((name, which), {})}
    with emulated(arch, copies_land_late=late) as ran:
        op.check(case, TYPES[dtype], 'triton', tolerance)
    assert ran


@pytest.mark.parametrize(('name', 'which', 'arch', 'dtype'), VARIANTS)
def test_output_and_every_gradient(name, which, arch, dtype, cut):
    if name == 'ttt_linear':
        cut(2 if 'segments' in which else 0)
    check(name, which, arch, dtype)


@pytest.mark.parametrize(('name', 'which'), CASES)
def test_copies_that_land_at_once(name, which, cut):
    if name == 'ttt_linear':
        cut(2 if 'segments' in which else 0)
    check(name, which, 80, 'bf16', late=False)
