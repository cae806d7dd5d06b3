"""Growth of ttt_linear's error with the length of the sequence: 13 to 4175 mini-batches.

The state goes through every mini-batch, and so does what was rounded in it. What keeps the error
from growing is the descent itself: a state that is off is corrected like any other wrong one.

    pytest tests/numbers/test_long_sequences.py -m "stress or not stress" -s

prints the rows of the table in docs/kernels.md, "Precision".
"""

import pytest
import scans
import torch
from precision import OUTPUT, TYPES, UNIT, evaluate

from ttt_kernels.ttt_linear import reference

stress = pytest.mark.stress
# Unit roundoffs, relative to the norm (Frobenius) of the truth. In bf16 and fp16 tokens are rounded
# going in and coming out, and nothing adds to it; in fp32 all sums round.
ALLOWED = {torch.float32: 64, torch.bfloat16: 2, torch.float16: 2}
# Small differences of large numbers; test_ops.py has bounds of their own for them.
STEPS = ('eta', 'token_scale')


def off(x, y):
    return ((x.double() - y).norm() / y.norm()).item()


def final_state(inputs):
    """W and c after all tokens, `(B, R, H, d + 1, d)`."""
    _, _, w, c = reference.forward(reference.Inputs(**inputs), 'fb', 16)
    return torch.cat([w[:, :, :, -1], c[:, :, :, -1:]], dim=-2)


@pytest.mark.parametrize(
    'tokens', [196, pytest.param(4200, marks=stress), pytest.param(66_800, marks=stress)]
)
def test_the_error_stays_within_a_few_roundings(tokens):
    inputs = scans.make(tokens, batch=1, heads=1, dim=64)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(inputs['q'].shape, generator=generator, dtype=torch.float64)
    exact, state = evaluate(scans.call, inputs, grad), final_state(inputs)
    for dtype in TYPES:
        low = {n: x.to(dtype if n in ('q', 'k', 'v') else torch.float32) for n, x in inputs.items()}
        actual = evaluate(scans.call, low, grad)
        errors = {n: off(x, exact[n]) for n, x in actual.items() if n not in STEPS}
        errors['state'] = off(final_state(low), state)
        worst = max(errors.keys() - {OUTPUT, 'state'}, key=errors.get)
        print(
            f'| {tokens} | {str(dtype).removeprefix("torch.")} | {errors[OUTPUT]:.1e} '
            f'| {errors["state"]:.1e} | {errors[worst]:.1e} ({worst}) '
            f'| {ALLOWED[dtype] * UNIT[dtype]:.1e} |'
        )
        wrong = {n: e for n, e in errors.items() if not e <= ALLOWED[dtype] * UNIT[dtype]}
        assert not wrong, dtype
