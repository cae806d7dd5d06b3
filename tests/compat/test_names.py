"""mmvttt's models by name in the inferencers of the toolboxes."""

import pytest
from mmdet.apis import DetInferencer
from mmengine.infer import BaseInferencer


@pytest.mark.parametrize('name', ['maskrcnn_vittt_t_1x', 'mmvttt::MaskRCNN_Vittt_T_1x'])
def test_inferencers(name: str) -> None:
    inferencer = object.__new__(DetInferencer)
    inferencer.scope = 'mmdet'
    cfg, weights = inferencer._load_model_from_metafile(name)
    assert cfg.model.backbone.backbone.type == 'mmvttt.Vittt'
    assert weights is None


def test_inferencers_keep_their_own_names() -> None:
    inferencer = object.__new__(DetInferencer)
    inferencer.scope = 'mmdet'
    cfg, _ = inferencer._load_model_from_metafile('mask-rcnn_r50_fpn_1x_coco')
    assert cfg.model.backbone.type == 'ResNet'
    with pytest.raises(ValueError, match='no_such_model'):
        inferencer._load_model_from_metafile('no_such_model')


def test_index() -> None:
    listed = BaseInferencer.list_models('mmvttt', '.*hvit3.*')
    assert 'maskrcnn_hvit3_t_1x' in listed
