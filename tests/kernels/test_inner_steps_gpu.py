"""The inner steps on a GPU: maps of a detector's size, heads without a kernel."""

import pytest
import torch
from inner_steps import inner_gradient
from ops import OPS, STEPS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('op', STEPS.values(), ids=STEPS)
def test_a_detection_sized_map_does_not_underflow(op, dtype):
    hw = (200, 334)
    inputs = op.make(hw, dim=32, batch=1, dtype=dtype, device='cuda')
    g = inner_gradient(op, inputs, hw, 'triton')
    expected = inner_gradient(op, {n: x.double() for n, x in inputs.items()}, hw, 'reference')
    # The gated model rounds the operands of its products to 11 or 8 bits.
    assert ((g - expected).norm() / expected.norm()).item() < (4e-4, 4e-3)[dtype == torch.bfloat16]


def test_head_dims_without_a_kernel_fall_back_and_say_so():
    op = OPS['ttt_glu']
    inputs = op.make((3, 5), dim=72, dtype=torch.bfloat16, device='cuda')
    with pytest.raises(RuntimeError, match='d is 72; the kernels have at most 64'):
        op.call(inputs, (3, 5), backend='triton')
    with pytest.warns(RuntimeWarning, match='d is 72'):
        actual = op.call(inputs, (3, 5), backend=None)
    assert torch.equal(actual, op.call(inputs, (3, 5), backend='reference'))
