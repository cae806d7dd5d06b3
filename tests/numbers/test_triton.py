"""The Triton kernels at loud, faint, zero and equal tokens, in Triton's interpreter.

In fp32 they stand where the references stand. In fp16 the operands of their products are fp16 as
well, at d = 32 and 64, and that is a smaller range than that of the tokens: see docs/kernels.md.
"""

import pytest
import torch
from kernel_testing import normal
from ops import OPS
from precision import ROUNDINGS, Truth, evaluate
from test_extremes_of_ops import EVERYWHERE, EXTREMES, OF_KEYS, OF_THE_STATE, all_scaled, scaled

interpreter = pytest.mark.interpreter
# Two mini-batches, the second of them ragged.
HW = (3, 7)
KERNELS = ('ttt_linear', 'ttt_glu', 'ttt_dwconv')


@pytest.fixture(params=[False, True], ids=['whole', 'cut'])
def segments(request, monkeypatch):
    """Runs the scans of ttt_linear whole, or in segments of one mini-batch."""
    from ttt_kernels.ttt_linear import kernel, reference

    monkeypatch.setattr(kernel, 'output_apart', lambda *_: request.param)
    if request.param:
        monkeypatch.setattr(reference, 'SEGMENT', 1)


def run(name, change, dtype):
    """Results of the kernels, and the truth with the options of its bounds."""
    op = OPS[name]
    inputs = change(op.make(HW, batch=1, heads=1, dim=32))
    grad = normal(torch.Generator().manual_seed(1), *op.call(inputs, HW).shape)
    truth = Truth(lambda x: op.call(x, HW), inputs, grad)
    low = op.cast(inputs, dtype)
    found = evaluate(lambda x: op.call(x, HW, backend='triton'), low, grad)
    kept = {n: torch.float32 for n in inputs if n not in op.tokens}
    cancelling = op.cancelling + op.suppressed
    return found, truth, {'types': kept, 'cancelling': cancelling, 'roundings': ROUNDINGS}


@interpreter
@pytest.mark.parametrize(
    ('name', 'extreme'),
    # Loud equal tokens make gradients of rank one, of which the damping leaves only rounding.
    [(n, e) for n in KERNELS for e in EVERYWHERE if (n, e) != ('ttt_glu', 'loud and equal')],
)
def test_every_extreme_in_fp32(name, extreme):
    found, truth, options = run(name, EXTREMES[extreme], torch.float32)
    truth.assert_near(found, torch.float32, **options)


@interpreter
@pytest.mark.parametrize('extreme', OF_KEYS | OF_THE_STATE)
def test_extremes_of_the_scan_in_fp32(extreme, segments):
    found, truth, options = run('ttt_linear', EXTREMES[extreme], torch.float32)
    assert found['token_scale'].isfinite().all()
    # The sum over all tokens of what mostly cancels in each: the order of the sum decides.
    truth.assert_near(found, torch.float32, skip=('token_scale',), **options)


@interpreter
@pytest.mark.parametrize('name', KERNELS)
@pytest.mark.parametrize(
    'change',
    [all_scaled(30), scaled(k=100, v=100), all_scaled(0), scaled(v=1e-6)],
    ids=['all 30', 'keys and values 100', 'zero', 'faint values'],
)
def test_fp16_within_its_range(name, change):
    found, truth, options = run(name, change, torch.float16)
    truth.assert_near(found, torch.float16, **options)


@interpreter
@pytest.mark.parametrize('extreme', ['loud', 'loud, at the start', 'zero keys, loud values'])
def test_loud_fp16_saturates_in_the_scan(extreme, segments):
    # E⊙(QKᵀ + 1), or G behind a σ of √ε: beyond 65504, where infinity would leave NaN in all tokens
    # that follow. What the output and the query's own gradient have of it is bounded by LayerNorm.
    found, truth, options = run('ttt_linear', EXTREMES[extreme], torch.float16)
    assert all(x.isfinite().all() for x in found.values())
    if extreme != 'zero keys, loud values':
        others = truth.exact.keys() - {'output', 'q'}
        truth.assert_near(found, torch.float16, skip=others, **options)


@interpreter
def test_loud_fp16_is_near_in_the_convolution():
    # It has no products of tiles: everything is fp32 between its tokens.
    found, truth, options = run('ttt_dwconv', all_scaled(1e3), torch.float16)
    truth.assert_near(found, torch.float16, **options)
