"""Every op at loud, faint, zero and equal tokens: finite, and as near to fp64 as the type allows.

The tokens are given in the type, and everything inside is fp32: so nothing may overflow on its way
to a result that fits the type. Where the result itself does not, infinity is the right answer.
"""

import pytest
import torch
from kernel_testing import normal
from ops import OPS
from precision import DEVICES, MAPS, ROUNDINGS, TYPES, Truth, evaluate

TOKENS = ('q', 'k', 'v', 'x', 'value')


def scaled(**factors):
    return lambda inputs: {n: x * factors.get(n, 1) for n, x in inputs.items()}


def equal(*names):
    """All tokens are the first."""
    return lambda inputs: {
        n: x[:, :1].expand_as(x).clone() if n in names else x for n, x in inputs.items()
    }


def all_scaled(factor):
    return scaled(**dict.fromkeys(TOKENS, factor))


def as_training_starts(inputs):
    """Learned inputs as training starts: zeros, but for a small W0."""
    start = {'w0': 0.1, 'b0': 0, 'ln_bias': 0}
    return {n: x * start.get(n, 1) for n, x in inputs.items()}


EVERYWHERE = {
    'loud': all_scaled(1e3),
    'faint': all_scaled(1e-6),
    'zero': all_scaled(0),
    'equal': equal(*TOKENS),
    'loud and equal': lambda inputs: equal(*TOKENS)(all_scaled(1e3)(inputs)),
}
OF_KEYS = {
    'equal keys': equal('k'),
    'zero keys': scaled(k=0),
    'faint keys, loud values': scaled(k=1e-6, v=1e3),
    'loud keys, faint values': scaled(k=1e3, v=1e-6),
}
# With nothing in the state, LayerNorm divides by √ε alone.
OF_THE_STATE = {
    'loud, at the start': lambda inputs: as_training_starts(all_scaled(1e3)(inputs)),
    'faint, at the start': lambda inputs: as_training_starts(all_scaled(1e-6)(inputs)),
    'zero keys, at the start': lambda inputs: as_training_starts(scaled(k=0)(inputs)),
    'zero keys, loud values': lambda inputs: as_training_starts(scaled(k=0, v=1e3)(inputs)),
}
EXTREMES = EVERYWHERE | OF_KEYS | OF_THE_STATE
CASES = [
    *((name, extreme) for name in OPS for extreme in EVERYWHERE),
    *((name, extreme) for name in ('ttt_linear', 'ttt_glu', 'ttt_dwconv') for extreme in OF_KEYS),
    *(('ttt_linear', extreme) for extreme in OF_THE_STATE),
]


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """The fp16 kernels have a smaller range than fp16 tokens; test_triton.py is about them."""
    monkeypatch.setenv('TTT_KERNELS_BACKEND', 'reference')


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('tokens', [1, 63])
@pytest.mark.parametrize(('name', 'extreme'), CASES)
def test_output_and_every_gradient(name, extreme, tokens, device):
    op, hw = OPS[name], MAPS[tokens]
    inputs = EXTREMES[extreme](op.make(hw, batch=1, heads=1, dim=32))
    grad = normal(torch.Generator().manual_seed(1), *op.call(inputs, hw).shape)
    truth = Truth(lambda x: op.call(x, hw), inputs, grad)
    assert all(x.isfinite().all() for x in truth.exact.values())
    kept = {n: torch.float32 for n in inputs if n not in op.tokens}
    cancelling = op.cancelling + op.suppressed
    for dtype in TYPES:
        low = op.cast(inputs, dtype, device)
        found = evaluate(lambda x: op.call(x, hw), low, grad.to(device))
        truth.assert_near(found, dtype, types=kept, cancelling=cancelling, roundings=ROUNDINGS)
