"""The kernels as Triton compiles them for sm_80 and sm_90, emulated, against the fp64 references.

What the interpreter can't show is here: bf16, tf32 and the other roundings of a GPU, layouts,
races, accesses out of bounds and reads of what nothing wrote. An op is a row of `CASES`. A few
variants of each run by `make test`, all of them by `make stress`.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import convolutions
import inner_steps
import pytest
import sampling
import scans
import torch
from emulator import emulated
from kernel_testing import assert_same, with_gradients
from torch import Tensor

Inputs = dict[str, Tensor]
TYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}


class Case(NamedTuple):
    """Some inputs of an op; `options` are whatever `make` and `call` of the op take."""

    make: Callable[[torch.dtype], Inputs]
    call: Callable[[Inputs, str], Tensor]  # inputs, backend
    tolerance: dict[str, float]  # of the largest value, by dtype
    cut: int | None = None  # ttt_linear: mini-batches of a segment, 0 is the fused path


# As the tests on a GPU have it; fp32 products are three in tf32 there and here.
SCAN = {'bf16': 3e-2, 'fp16': 4e-3, 'fp32': 5e-4}
STEP = {'bf16': 4e-2, 'fp16': 4e-3, 'fp32': 4e-5}


def scan(
    tokens: int, ways: str = 'fb', *, size: int = 16, cut: int = 0, scale: bool = True, **sizes
) -> Case:
    def make(dtype: torch.dtype) -> Inputs:
        inputs = scans.make(tokens, ways, size, batch=1, dtype=dtype, **sizes)
        return inputs if scale else {**inputs, 'token_scale': None}

    return Case(
        make, lambda inputs, backend: scans.call(inputs, ways, size, backend=backend), SCAN, cut
    )


def step(
    op: str,
    hw: tuple[int, int],
    *,
    loss: str | None = None,
    tolerance: dict[str, float] = STEP,
    **sizes,
) -> Case:
    case, options = inner_steps.CASES[op], {'loss': loss} if loss else {}
    return Case(
        lambda dtype: case.make(hw, batch=1, dtype=dtype, **sizes),
        lambda inputs, backend: case.call(inputs, hw, backend=backend, **options),
        tolerance,
    )


def deformable(shapes: tuple, **sizes) -> Case:
    return Case(
        lambda dtype: sampling.make(shapes, batch=1, dtype=dtype, **sizes),
        lambda inputs, backend: sampling.call(inputs, shapes, backend=backend),
        STEP,
    )


def convolution(tokens: int, ways: str, **sizes) -> Case:
    return Case(
        lambda dtype: convolutions.make(tokens, ways, batch=1, dtype=dtype, **sizes),
        lambda inputs, backend: convolutions.call(inputs, ways, backend=backend),
        STEP,
    )


def softmax_inside(shapes: tuple, **sizes) -> Case:
    """`deformable` with the softmax and the locations inside."""

    def make(dtype: torch.dtype) -> Inputs:
        # Offsets that every type holds, and locations off the borders of cells: a rounding that
        # moves one across changes the slope.
        inputs = sampling.fused(
            sampling.make(shapes, batch=1, dtype=torch.float64, **sizes), shapes
        )
        offsets = inputs['sampling_offsets'].mul(4).round().div(4)
        cells = torch.tensor(shapes, dtype=torch.float64).flip(-1)
        places = ((inputs['reference_points'] * cells).floor() + 0.125) / cells
        inputs |= {'sampling_offsets': offsets, 'reference_points': places}
        tokens = {n: x.to(dtype) for n, x in inputs.items()}
        return tokens | {'reference_points': places.float()}

    return Case(
        make, lambda inputs, backend: sampling.call_fused(inputs, shapes, backend=backend), STEP
    )


CASES = {
    'ttt_linear fused, T 17': scan(17, heads=1, dim=64),
    'ttt_linear in segments, T 49': scan(49, 'b', cut=2, heads=1, dim=64),
    'ttt_linear fused, T 1, d 32': scan(1, heads=2, dim=32),
    'ttt_linear in segments, T 63, d 32': scan(63, 'fb', cut=3, heads=1, dim=32, scale=False),
    'ttt_linear fused, T 17, d 128': scan(17, heads=1, dim=128),
    'ttt_linear in segments, T 37, d 72': scan(37, cut=2, heads=1, dim=72),
    'ttt_linear fused, T 70, b 64': scan(70, 'b', size=64, heads=1, dim=64),
    'ttt_linear in segments, T 90, b 40': scan(90, 'b', size=40, cut=1, heads=1, dim=32),
    'ttt_linear fused, T 10, b 4': scan(10, size=4, heads=1, dim=32, scale=False),
    'ttt_linear fused, T 196': scan(196, 'bf', heads=1, dim=64),
    'causal_conv T 37': convolution(37, 'fb', channels=70),
    'causal_conv T 3, one of 8 taps': convolution(3, 'b', weights=1, channels=16, taps=8),
    'ttt_glu 7 × 9': step('glu', (7, 9), heads=1, dim=64),
    'ttt_glu 9 × 13, d 32': step('glu', (9, 13), heads=3, dim=32),
    # The step of a single token is divided by its own norm: one unit roundoff of the tokens moves
    # the gradients of w1 and w2 by 19 and 7 %, in fp16 by 2.5 and 1.1 %.
    'ttt_glu 1 × 1': step('glu', (1, 1), heads=1, dim=64, tolerance={'bf16': 0.14, 'fp16': 0.02}),
    'ttt_dwconv 7 × 9': step('dwconv', (7, 9), dim=64),
    'ttt_dwconv 9 × 13, d 5': step('dwconv', (9, 13), dim=5),
    'ttt_dwconv 31 × 33, d 80': step('dwconv', (31, 33), dim=80),
    'ttt_mlp 7 × 9': step('mlp', (7, 9), heads=1, dim=64),
    'ttt_mlp 7 × 9, L2': step('mlp', (7, 9), loss='l2', heads=1, dim=64),
    'ttt_mlp 9 × 13, d 32': step('mlp', (9, 13), heads=3, dim=32),
    'ttt_mlp SwiGLU 9 × 13, d 32': step('swiglu', (9, 13), heads=1, dim=32),
    'ttt_mlp SwiGLU 7 × 9, L2': step('swiglu', (7, 9), loss='l2', heads=1, dim=64),
    'deform_attn 5 × 7, 3 × 4': deformable(((5, 7), (3, 4)), queries=9, heads=2, dim=16),
    'deform_attn 1 × 1, d 24': deformable(((1, 1),), queries=3, heads=3, dim=24),
    'deform_attn 9 × 13, d 128': deformable(((9, 13),), queries=7, heads=1, dim=128),
    'deform_attn fused, 1 level': softmax_inside(((6, 5),), queries=11, heads=2, dim=32),
    'deform_attn fused, 3 levels': softmax_inside(
        ((4, 6), (2, 3), (1, 2)), queries=7, heads=1, dim=64
    ),
}
# By `make test`; each compiles its kernels anew, which takes longer than they run.
QUICK = {
    ('ttt_linear fused, T 17', 90, 'bf16'),
    ('ttt_linear in segments, T 49', 80, 'fp16'),
    ('causal_conv T 37', 90, 'bf16'),
    ('ttt_glu 7 × 9', 90, 'bf16'),
    ('ttt_glu 9 × 13, d 32', 80, 'fp16'),
    ('ttt_dwconv 7 × 9', 90, 'fp16'),
    ('ttt_mlp 7 × 9', 90, 'bf16'),
    ('deform_attn 5 × 7, 3 × 4', 80, 'fp16'),
    ('deform_attn fused, 1 level', 90, 'bf16'),
}
GLU_64 = ('ttt_glu 7 × 9', 'ttt_glu 1 × 1')
VARIANTS = [
    pytest.param(
        *v, id=f'{v[0]}, sm_{v[1]}, {v[2]}', marks=() if v in QUICK else pytest.mark.stress
    )
    for v in itertools.product(CASES, (80, 90), TYPES)
    # In fp32 these run as their references.
    if v[2] != 'fp32' or not (v[0].startswith('ttt_mlp') or v[0] in GLU_64)
]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Has torch fill every fresh tensor with NaN: what is not written cannot go unseen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def cut(monkeypatch):
    """Sets the mini-batches of a segment, with the output apart from the scan; 0: in the scan."""
    from ttt_kernels.ttt_linear import _plans, reference

    def set_cut(chunks):
        monkeypatch.setattr(_plans, 'PLANS', (_plans.Plan('', 0, float('inf'), 0, chunks > 0),))
        if chunks:
            monkeypatch.setattr(reference, 'SEGMENT', chunks)

    return set_cut


def check(case: Case, arch: int, dtype: str, late: bool = True) -> None:
    inputs = case.make(TYPES[dtype])
    exact = {n: x if x is None else x.double() for n, x in inputs.items()}
    with emulated(arch, copies_land_late=late) as ran:
        found = with_gradients(lambda x: case.call(x, 'triton'), inputs)
    assert ran
    expected = with_gradients(lambda x: case.call(x, 'reference'), exact)
    assert not found[0].isnan().any()
    assert_same(found, expected, case.tolerance[dtype])


@pytest.mark.parametrize(('name', 'arch', 'dtype'), VARIANTS)
def test_output_and_every_gradient(name, arch, dtype, cut):
    case = CASES[name]
    if case.cut is not None:
        cut(case.cut)
    check(case, arch, dtype)


@pytest.mark.stress
@pytest.mark.parametrize('name', CASES)
def test_copies_that_land_at_once(name, cut):
    case = CASES[name]
    if case.cut is not None:
        cut(case.cut)
    check(case, 80, 'bf16', late=False)
