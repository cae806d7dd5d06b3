"""mmdet's own detectors on our backbone, without a compiled mmcv: a training step, a prediction."""

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.hub import get_config
from mmengine.registry import init_default_scope

from mmvttt.openmmlab.registry import MODELS

from .reduced import batch_for, reduce_backbone

NAMES = (
    'atss/atss_r50_fpn_1x_coco',
    'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco',
    'gfl/gfl_r50_fpn_1x_coco',
    'retinanet/retinanet_r50_fpn_1x_coco',
)


@pytest.mark.parametrize('name', NAMES)
def test_a_step_and_a_prediction(name: str) -> None:
    cfg = get_config(f'mmdet::{name}.py')
    init_default_scope('mmdet')
    neck = cfg.model.neck[0] if isinstance(cfg.model.neck, list) else cfg.model.neck
    cfg.model.backbone = ConfigDict(type='mmvttt.HViT3')
    neck.in_channels = reduce_backbone(cfg.model.backbone)
    model = MODELS.build(cfg.model)
    # Some heads have weights that nothing but this fills.
    model.init_weights()
    model.train()
    losses = model(**model.data_preprocessor(batch_for(cfg), True), mode='loss')
    loss, _ = model.parse_losses(losses)
    loss.backward()
    weights = dict(model.named_parameters())
    assert loss.isfinite()
    assert all(w.grad.isfinite().all() for w in weights.values() if w.grad is not None)
    assert any(w.grad.any() for n, w in weights.items() if n.startswith('backbone.stages.0'))
    with torch.no_grad():
        samples = model.eval().test_step(batch_for(cfg))
    assert all(sample.pred_instances.bboxes.shape[1] == 4 for sample in samples)
