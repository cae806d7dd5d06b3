"""torch's calls of a training step, views apart: on a GPU, most of an eager step's host time."""

from typing import Any

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mmvttt.models.timm  # noqa: F401 - registers the models

PLAIN = dict(embed_dims=64, num_layers=12, num_heads=2, feedforward_channels=128)
STAGES = dict(embed_dims=(32, 64, 96, 128), depths=(1, 3, 9, 4), num_heads=(1, 2, 3, 4))
DEIT = dict(embed_dim=64, depth=12, num_heads=2, img_size=64)


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ('name', 'options', 'most'),
    [
        # timm's, to which the others are compared: another number is another torch or timm.
        ('deit_small_patch16_224', DEIT, 719),
        ('vittt_small_patch16_224', dict(arch=PLAIN), 1082),
        ('vit3_small_patch16_224', dict(arch=PLAIN), 755),
        ('t5_small_patch16_224', dict(arch=PLAIN), 938),
        ('h_vit3_tiny', dict(arch=STAGES), 1524),
    ],
)
def test_calls_of_a_training_step(name: str, options: dict[str, Any], most: int) -> None:
    """With bf16 autocast, without optimizer; `host_time.py --only steps` has the times."""
    model = timm.create_model(name, num_classes=10, **options).train()
    x = torch.randn(1, 3, 64, 64)
    with Calls() as calls:
        with torch.autocast('cpu', torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()
    assert 0 < calls.count <= most
