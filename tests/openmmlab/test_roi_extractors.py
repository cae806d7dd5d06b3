"""RoIs keep their pixels where features are in bf16 or fp16, in our configs and nowhere else."""

import pytest
import torch
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmengine.config import Config

from mmvttt.openmmlab.config import config_root
from mmvttt.openmmlab.registry import MODELS

OPTIONS = dict(
    roi_layer=dict(type='RoIAlign', output_size=3, sampling_ratio=0),
    out_channels=1,
    featmap_strides=[4, 8],
)
# Heads for a CPU.
THIN = (
    'maskrcnn_vittt_demo',
    'maskrcnn_vittt_nano_pennfudan',
    'maskrcnn_vit_nano_pennfudan',
)
BOX = torch.tensor([[0.0, 801.0, 8.0, 825.0, 40.0]])


def ramp() -> tuple[torch.Tensor, ...]:
    """Features of one unit per pixel, in steps that half types hold exactly."""
    return tuple(
        torch.arange(0.0, 1024, stride).expand(1, 1, 16, -1).contiguous() for stride in (4, 8)
    )


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_ours_does_not_move_boxes(dtype: torch.dtype) -> None:
    extractor = MODELS.build(dict(type='mmvttt.FP32RoIExtractor', **OPTIONS))
    full = extractor(ramp(), BOX)
    # A bin's centre, half a pixel of stride 4 further left.
    torch.testing.assert_close(full[0, 0, 0], torch.tensor([803.0, 811, 819]), rtol=0, atol=1e-3)
    half = extractor(tuple(f.to(dtype) for f in ramp()), BOX)
    # Not a rounding more than in fp32: in bf16, 801 would have become 800, and 825 824.
    torch.testing.assert_close(half, full, rtol=0, atol=0)


def test_mmdet_s_own_stays_as_it_is() -> None:
    extractor = SingleRoIExtractor(**OPTIONS)
    full = extractor(ramp(), BOX)
    half = extractor(tuple(f.bfloat16() for f in ramp()), BOX)
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).abs().max() > 0.5


@pytest.mark.parametrize('path', sorted(config_root().glob('maskrcnn_*.py')), ids=lambda p: p.stem)
def test_every_config_has_ours(path) -> None:
    heads = Config.fromfile(path).model.roi_head
    for part in ('bbox_roi_extractor', 'mask_roi_extractor'):
        assert heads[part].type == 'mmvttt.FP32RoIExtractor'
        assert heads[part].out_channels == 256 or path.stem in THIN
