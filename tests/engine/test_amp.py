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


def test_the_backbone_computes_in_half_precision_as_under_autocast() -> None:
    torch.manual_seed(0)
    detector, other, x = Detector().eval(), Detector().eval(), torch.randn(1, 3, 64, 96)
    dtype = getattr(torch, amp.half_type())
    with torch.no_grad():
        (exact,) = detector.backbone(x)
        with torch.autocast('cpu', dtype):
            (expected,) = detector.backbone(x)
        amp.autocast_backbone(other)
        # Weights are rounded once, and checkpoints load.
        other.load_state_dict(detector.state_dict())
        (half,) = other.backbone(x)
    assert half.dtype == torch.float32
    assert torch.equal(half, expected.float())
    assert not torch.equal(half, exact)
    assert other.backbone.blocks[0].mlp.fc1.weight.dtype == dtype
    assert other.backbone.blocks[0].mixer.w1.dtype == torch.float32
    with pytest.raises(UsageError, match='Linear has no backbone'):
        amp.autocast_backbone(nn.Linear(2, 2))
