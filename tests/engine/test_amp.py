"""Mixed precision of a backbone in evaluation, and of a training without a GPU."""

import copy
import pickle

import pytest
import torch
from mmengine.optim import AmpOptimWrapper
from mmengine.registry import MODELS
from torch import nn

from mmvttt.deploy.prepare import prepare
from mmvttt.errors import UsageError
from mmvttt.openmmlab.engine import amp

ARCH = dict(embed_dims=64, num_layers=2, num_heads=2, feedforward_channels=96)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = MODELS.build(dict(type='mmvttt.ViT3', arch=ARCH))


def test_the_backbone_computes_in_half_precision_as_under_autocast() -> None:
    torch.manual_seed(0)
    detector, x = Detector().eval(), torch.randn(1, 3, 64, 96)
    dtype = getattr(torch, amp.half_type())
    with torch.no_grad():
        (exact,) = detector.backbone(x)
        with torch.autocast('cpu', dtype):
            (expected,) = detector.backbone(x)
        other = prepare(detector, 'backbone', amp.half_type())
        (half,) = other.backbone(x)
        (again,) = detector.backbone(x)
    assert half.dtype == torch.float32
    assert torch.equal(half, expected.float())
    assert not torch.equal(half, exact)
    assert torch.equal(again, exact)
    for one in (copy.copy(other), copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        with torch.inference_mode():
            assert torch.equal(one.backbone(x)[0], half)
    short = copy.deepcopy(other)
    short.backbone.network.norm = nn.Identity()
    with torch.no_grad():
        assert not torch.equal(short.backbone(x)[0], half)
        assert torch.equal(other.backbone(x)[0], half)
    with pytest.raises(UsageError):
        prepare(nn.Linear(2, 2), 'backbone', amp.half_type())


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
