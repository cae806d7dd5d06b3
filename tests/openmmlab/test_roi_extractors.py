"""RoIs and anchors keep their pixels in bf16 and fp16, in our configs and nowhere else."""

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import init_default_scope

from mmvttt.openmmlab.config import config_root
from mmvttt.openmmlab.registry import MODELS

OPTIONS = dict(
    roi_layer=dict(type='RoIAlign', output_size=3, sampling_ratio=0),
    out_channels=1,
    featmap_strides=[4, 8],
)
ANCHORS = dict(strides=[4, 8], ratios=[0.5, 1.0], scales=[8])
# Two rows of the maps of an image 1333 pixels wide, padded to 1344.
SIZES = [(2, 336), (2, 168)]
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


def rpn_proposals(
    kind: str, scores: list[torch.Tensor], deltas: list[torch.Tensor]
) -> torch.Tensor:
    """Proposals `(N, 4)` of mmdet's RPN, sorted, none suppressed."""
    init_default_scope('mmdet')
    head = MODELS.build(
        dict(
            type='mmdet.RPNHead',
            in_channels=1,
            anchor_generator=dict(type=kind, **ANCHORS),
            bbox_coder=dict(
                type='DeltaXYWHBBoxCoder', target_means=[0.0] * 4, target_stds=[1.0] * 4
            ),
        )
    )
    cfg = ConfigDict(nms_pre=-1, max_per_img=9999, nms=dict(type='nms', iou_threshold=1.0))
    (predictions,) = head.predict_by_feat(
        scores, deltas, batch_img_metas=[dict(img_shape=(800, 1333))], cfg=cfg
    )
    return predictions.bboxes.unique(dim=0)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_ours_does_not_move_proposals(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scores = [torch.randn(1, 2, *size).to(dtype) for size in SIZES]
    deltas = [torch.randn(1, 8, *size).mul(0.1).to(dtype) for size in SIZES]
    with torch.autocast('cpu', dtype):
        proposals = rpn_proposals('mmvttt.FP32AnchorGenerator', scores, deltas)
        # mmdet takes the anchors' type from the scores.
        expected = rpn_proposals('AnchorGenerator', [s.float() for s in scores], deltas)
    assert len(proposals) > 2000
    assert proposals.dtype == torch.float32
    torch.testing.assert_close(proposals, expected, rtol=0, atol=0)


@pytest.mark.parametrize('path', sorted(config_root().glob('*rcnn_*.py')), ids=lambda p: p.stem)
def test_every_config_has_ours(path) -> None:
    model = Config.fromfile(path).model
    assert model.rpn_head.anchor_generator.type == 'mmvttt.FP32AnchorGenerator'
    for part in ('bbox', 'mask') if model.roi_head.get('mask_head') else ('bbox',):
        assert model.roi_head[f'{part}_roi_extractor'].type == 'mmvttt.FP32RoIExtractor'
