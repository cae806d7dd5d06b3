"""Mixed precision of a training without a GPU."""

import pytest
import torch
from mmengine.optim import AmpOptimWrapper


@pytest.mark.skipif(torch.cuda.is_available(), reason='there mmengine needs no patch')
@pytest.mark.parametrize('loss_scale', ['dynamic', 512.0, dict(init_scale=512.0)])
def test_steps_in_bf16_like_fp32(loss_scale: object) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    x = torch.randn(7, 5)
    (grad,) = torch.autograd.grad(model(x).sum(), model.weight)
    before = model.weight.detach().clone()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optim = AmpOptimWrapper(optimizer=sgd, loss_scale=loss_scale)
    with optim.optim_context(model):
        out = model(x)
    assert out.dtype == torch.bfloat16
    optim.update_params(out.float().sum())
    # x is rounded to 8 bits, and so is the sum over the seven samples.
    torch.testing.assert_close((before - model.weight) / 0.1, grad, rtol=2**-6, atol=2**-6)
