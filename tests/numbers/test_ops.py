"""Every op, type and backend against the op in fp64, at tokens as models have them.

The error of a reference is bounded by a few roundings of its type, `Truth.allowed` (precision.py),
that of a kernel by the reference's in the same type: a constant bound hides an instability, and
tokens of size 1 say nothing about those of size 0.1, at which a training starts. At extremes, where
a reference may be right by luck, kernels have its bound. model_inputs.py has the inputs.

    pytest tests/numbers/test_ops.py -k "triton or numba" -s

prints the errors of each kernel beside the reference's.
"""

from pathlib import Path

import emulation
import pytest
import torch
from kernel_testing import normal
from model_inputs import MODELS, extremes, recorded_kinds
from ops import OPS
from precision import (
    DEVICES,
    MAPS,
    OUTPUT,
    ROUNDINGS,
    ROUNDINGS_OF_AN_OP,
    TYPES,
    UNIT,
    Truth,
    evaluate,
)

import ttt_kernels
from ttt_kernels import _backend, _op

FP32, BF16, FP16 = TYPES
KERNELS = Path(ttt_kernels.__file__).parent
WITH_NUMBA = [n for n in OPS if (KERNELS / OPS[n].name / '_numba.py').exists()]
# How often the error of the reference in the same type a kernel may have. It sums in another order
# and on another path; in half precision it also rounds the operands of its products, some five in
# a row, and the reference only the tokens. On a GPU a product of fp32 is three of tf32, which keep
# 21 of 24 bits.
FACTOR = {FP32: 4, BF16: 4, FP16: 4}
FACTOR_ON_A_GPU = FACTOR | {FP32: 16}
SIZES = {'batch': 1, 'heads': 1, 'dim': 32}


def prepare(name, kind, hw, options, sizes):
    """Inputs, the op as a function of them and a backend, and a gradient of its output."""
    op = OPS[name]
    change = (MODELS | recorded_kinds(name) | extremes(name))[kind]
    inputs = change(op.make(hw, **SIZES | sizes))

    def call(inputs, backend='reference'):
        return op.call(inputs, hw, backend=backend, **options)

    return inputs, call, normal(torch.Generator().manual_seed(1), *call(inputs).shape)


def check_reference(name, kind, tokens, device='cpu'):
    op, (inputs, call, grad) = OPS[name], prepare(name, kind, MAPS[tokens], {}, {})
    truth = Truth(call, inputs, grad)
    for dtype in TYPES:
        if (op.name, kind, dtype) == ('ttt_mlp', 'size 100', FP16):
            continue  # without damping, gradients of 1e9 are beside others of 1e4
        actual = evaluate(call, op.cast(inputs, dtype, device), grad.to(device))
        assert_near(op, truth, actual, dtype, kind, tokens)


def assert_near(op, truth, found, dtype, kind, tokens, roundings=ROUNDINGS_OF_AN_OP, skip=()):
    plain = kind == 'size 1'
    truth.assert_near(
        found,
        dtype,
        types={n: FP32 for n in truth.leaves if n not in op.tokens},
        cancelling=op.cancelling + (() if plain else op.suppressed),
        one_by_one=dict.fromkeys(op.convolved, tokens),
        draws=1 if tokens == 66_800 else 2,
        roundings=roundings if plain else ROUNDINGS,
        skip=skip,
    )


def check_kernel(
    name, kind, dtype, backend, hw, factor=FACTOR, device='cpu', options=None, **sizes
):
    """A kernel's errors against the reference's, for the output and each gradient.

    Not for `suppressed` ones of an outlier in half precision: they are the rounding of operands.
    """
    op, (inputs, call, grad) = OPS[name], prepare(name, kind, hw, options or {}, sizes)
    low = op.cast(inputs, dtype, device)
    actual = evaluate(lambda x: call(x, backend), low, grad.to(device))
    if kind in extremes(name):
        # The order of a sum over all tokens decides what is left of a gradient that cancels.
        skip = ('token_scale',) if kind != 'size 1' else ()
        truth = Truth(call, inputs, grad)
        assert_near(op, truth, actual, dtype, kind, hw[0] * hw[1], ROUNDINGS, skip)
        return
    exact = evaluate(call, inputs, grad)
    same = evaluate(call, op.cast(inputs, dtype), grad)
    if not all(x.isfinite().all() for x in same.values()):
        return  # results beyond the range of the type
    error, expected = (
        {n: ((x[n].double().cpu() - y).norm() / y.norm()).item() for n, y in exact.items()}
        for x in (actual, same)
    )
    times = {}
    for n in exact:
        # A gradient that is nearer than the output, behind the same steps, is so by luck.
        least = max(expected[n], expected[OUTPUT], UNIT[dtype])
        if n in op.cancelling:
            # A LayerNorm hides most of a step's length: D·G is a small part of ‖D‖·‖G‖, the
            # rounded operands of a kernel.
            least *= 12
        if not (n in op.suppressed and kind == 'outlier' and dtype != FP32):
            times[n] = error[n] / least
    worst = max(times.keys() - {OUTPUT}, key=times.get)
    print(
        f'| {name} {sizes or ""} | {str(dtype)[6:]} | {backend} | {kind} '
        f'| {expected[OUTPUT]:.1e} | {error[OUTPUT]:.1e} '
        f'| {expected[worst]:.1e} | {error[worst]:.1e} ({worst}) |'
    )
    wrong = {n: f'{t:.2g}' for n, t in times.items() if not t <= factor[dtype]}
    assert not wrong, wrong


# They are linear in their tokens, whose size and likeness do not matter.
LINEAR = ('causal_conv', 'deform_attn')


def cases(names, *more, models=tuple(MODELS)):
    """Ops and kinds of inputs; `more` in place of the extremes."""
    return [
        (name, kind)
        for name in names
        for kind in (
            *(('size 0.001', 'outlier') if name in LINEAR else models),
            *recorded_kinds(name),
            *(more or extremes(name)),
        )
    ]


# ------------------------------------------------------------------------------------- references


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize(('name', 'kind'), cases(OPS))
def test_reference(name, kind, device):
    for tokens in (1, 63) if kind in extremes(name) else (63,):
        check_reference(name, kind, tokens, device)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('tokens', [15, 196, 4200, pytest.param(66_800, marks=pytest.mark.stress)])
@pytest.mark.parametrize('name', OPS)
def test_reference_at_any_length(name, tokens, device):
    check_reference(name, 'size 1', tokens, device)


# ---------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize(('name', 'kind'), cases(WITH_NUMBA))
def test_numba(name, kind):
    if missing := ttt_kernels.available()[OPS[name].name]['numba']:
        pytest.skip(missing)
    # 33 channels fill no vectors. Extremes are for sizes at which the reference is exact enough.
    sizes = {} if kind in extremes(name) else {'dim': 33}
    for dtype in TYPES:
        check_kernel(name, kind, dtype, 'numba', (7, 9), **sizes)


@pytest.mark.parametrize('name', WITH_NUMBA)
def test_numba_over_many_tokens(name):
    if missing := ttt_kernels.available()[OPS[name].name]['numba']:
        pytest.skip(missing)
    check_kernel(name, 'size 0.3', FP32, 'numba', (100, 150))


# Scans of tokens of .03 and .3 follow below.
INTERPRETED = [kind for kind in MODELS if kind not in ('size 0.03', 'size 0.3', 'size 1')]


# Loud equal tokens make gradients of rank one, of which the damping leaves only rounding.
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ('name', 'kind'),
    [c for c in cases(OPS, models=INTERPRETED) if c != ('ttt_glu', 'loud and equal')],
)
def test_triton(name, kind, cut):
    cut(3)
    # Extremes in two mini-batches: in more the state is stepped back from one beyond all measure.
    check_kernel(name, kind, FP32, 'triton', (3, 7) if kind in extremes(name) else (7, 9))


# In half precision kernels have a smaller range than the tokens: docs/kernels.md.
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ('name', 'kind'),
    [
        (name, kind)
        for name in OPS
        for kind in ('size 0.001', 'size 0.1', 'size 10', 'outlier', *recorded_kinds(name), 'zero')
    ],
)
def test_triton_in_half_precision(name, kind, cut):
    cut(3)
    check_kernel(name, kind, FP16, 'triton', (7, 9))


# Tokens of a mini-batch, channels, and mini-batches of a segment.
SCANS = [(16, 64, 32), (16, 48, 3), (12, 32, 3)]


def check_scan(b, dim, size, dtype, *where):
    kind, options = f'size {size}', {'size': b}
    check_kernel(
        'ttt_linear', kind, dtype, 'triton', (12, 13), *where, options=options, dim=dim, size=b
    )


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ('b', 'dim', 'segment', 'size', 'dtype'),
    [*((*scan, 0.03, FP32) for scan in SCANS), *((*scan, 0.3, FP16) for scan in SCANS[::2])],
    ids=str,
)
def test_triton_scans_of_small_tokens(b, dim, segment, size, dtype, cut):
    # Rounding errors of a mean over the features grow with every mini-batch, and where the backward
    # pass recomputes the state, from the first one of a segment on.
    cut(segment)
    check_scan(b, dim, size, dtype)


@pytest.mark.parametrize(
    ('kind', 'hw'),
    [*((kind, (7, 9)) for _, kind in cases(['ttt_linear'], 'size 1')), ('size 0.3', (40, 400))],
)
def test_the_emulated_scan_in_bf16(kind, hw, monkeypatch):
    """Which the interpreter lacks, in a thousand mini-batches too."""
    choose = lambda op, backend, *_: emulation if backend == 'triton' else None  # noqa: E731
    monkeypatch.setattr(_backend, 'choose', choose)
    _op.OPS['ttt_linear'].plans.clear()
    check_kernel('ttt_linear', kind, BF16, 'triton', hw, dim=64)
    _op.OPS['ttt_linear'].plans.clear()


@pytest.mark.interpreter
@pytest.mark.parametrize('kind', ['loud', 'loud, at the start', 'zero keys, loud values'])
def test_loud_fp16_saturates_in_the_scan(kind, cut):
    # E⊙(QKᵀ + 1), or G behind a σ of √ε: beyond 65504, where infinity would leave NaN in all tokens
    # that follow.
    cut(1)
    inputs, call, grad = prepare('ttt_linear', kind, (3, 7), {}, {})
    actual = evaluate(lambda x: call(x, 'triton'), OPS['ttt_linear'].cast(inputs, FP16), grad)
    assert all(x.isfinite().all() for x in actual.values())


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', TYPES, ids=str)
@pytest.mark.parametrize(('name', 'kind'), cases(OPS, 'size 1', 'zero'))
def test_triton_on_a_gpu(name, kind, dtype):
    if kind == 'size 100' and dtype == FP16:
        pytest.skip('beyond the range of the products')
    for hw, dim in (((7, 9), 32), ((31, 33), 64)):
        check_kernel(name, kind, dtype, 'triton', hw, FACTOR_ON_A_GPU, 'cuda', dim=dim)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', TYPES, ids=str)
@pytest.mark.parametrize('size', [0.03, 0.3])
@pytest.mark.parametrize(('b', 'dim', 'segment'), [*SCANS, (4, 64, 3), (16, 5, 32), (16, 128, 3)])
def test_triton_scans_on_a_gpu(b, dim, segment, size, dtype, cut):
    cut(segment)
    check_scan(b, dim, size, dtype, FACTOR_ON_A_GPU, 'cuda')
