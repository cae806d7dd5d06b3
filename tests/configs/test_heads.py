"""mmdet's and mmseg's own heads with transformers, on our operator."""

from pathlib import Path

import pytest
from mmengine.config import Config

from mmvttt.analysis.flops import count_cost
from mmvttt.openmmlab.analysis.models import DenseForward

from .reduced import build, reduce_model

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


@pytest.mark.parametrize(
    'name', ['dino_hvit3_t_1x', 'mask2former_hvit3_t_1x', 'mask2former_vittt_s_160k']
)
def test_flops_of_heads_with_transformers(name: str) -> None:
    """They read sizes from tensors, which the meta device has not: it is the CPU that counts."""
    model = build(reduce_model(Config.fromfile(CONFIGS / f'{name}.py')))
    cost = count_cost(DenseForward(model), (64, 96))
    heads = [n for n in cost.macs if n in ('encoder', 'bbox_head', 'panoptic_head', 'decode_head')]
    assert heads
    assert all(cost.macs[n] > 0 for n in (*heads, 'backbone'))
    assert cost.total_params == sum(p.numel() for p in model.parameters())
    assert cost.uncounted == []
