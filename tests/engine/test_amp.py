"""Mixed precision of a backbone in evaluation."""

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn

from mmvttt.errors import UsageError
from mmvttt.openmmlab.engine import amp

ARCH = dict(embed_dims=64, num_layers=2, num_heads=2, feedforward_channels=96)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = MODELS.build(dict(type='mmvttt.ViT3', arch=ARCH))


def test_the_backbone_computes_in_half_precision_and_returns_fp32() -> None:
    torch.manual_seed(0)
    detector, x = Detector().eval(), torch.randn(1, 3, 64, 96)
    seen = []
    mlp = detector.backbone.blocks[0].mlp.fc1
    mlp.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with torch.no_grad():
        (exact,) = detector.backbone(x)
        amp.autocast_backbone(detector)
        (half,) = detector.backbone(x)
    assert seen == [torch.float32, getattr(torch, amp.half_type())]
    assert half.dtype == torch.float32
    # bf16 keeps 8 bits: a few roundings of 2^-9.
    assert 0 < (half - exact).norm() / exact.norm() < 0.05


def test_rounded_weights_give_the_bits_of_autocast_and_load_checkpoints() -> None:
    torch.manual_seed(0)
    detector, other, x = Detector().eval(), Detector().eval(), torch.randn(1, 3, 64, 96)
    dtype = getattr(torch, amp.half_type())
    with torch.no_grad(), torch.autocast('cpu', dtype):
        (expected,) = detector.backbone(x)
    amp.autocast_backbone(other)
    other.load_state_dict(detector.state_dict())
    with torch.no_grad():
        (half,) = other.backbone(x)
    assert torch.equal(half, expected.float())
    assert other.backbone.blocks[0].mlp.fc1.weight.dtype == dtype
    assert other.backbone.blocks[0].mixer.w1.dtype == torch.float32


def test_a_model_without_backbone_is_refused() -> None:
    with pytest.raises(UsageError, match='Linear has no backbone'):
        amp.autocast_backbone(nn.Linear(2, 2))
