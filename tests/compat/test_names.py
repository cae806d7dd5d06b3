"""mmvttt's models by name in the functions of mmengine and mmpretrain."""

import mmengine.hub
import mmpretrain
import pytest
import torch
from mmdet.apis import DetInferencer
from mmengine.infer import BaseInferencer

from mmvttt.config import config_root


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


def test_mmengine_hub() -> None:
    assert mmengine.hub.get_config('mmvttt::upernet_vittt_t_160k').default_scope == 'mmseg'
    model = mmengine.hub.get_model('mmvttt::vittt_t_in1k.py')
    assert type(model).__name__ == 'ImageClassifier'
    with pytest.raises(ValueError, match='publishes no weights'):
        mmengine.hub.get_model('mmvttt::vittt_t_in1k', pretrained=True)
    with pytest.raises(FileNotFoundError, match='vittt_t_in1k'):
        mmengine.hub.get_config('mmvttt::vittt_t_in2k')


def test_mmpretrain() -> None:
    listed = set(mmpretrain.list_models('*vit3*')) | set(mmpretrain.list_models('*vittt*'))
    assert listed == {
        path.stem for path in config_root().glob('*_in1k.py') if 'mesa' not in path.stem
    } | {name for name in listed if 'mesa' in name}
    assert {'vittt_t_in1k', 'hvit3_b_in1k'} <= listed
    model = mmpretrain.get_model('vittt_t_in1k', head=dict(num_classes=3)).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)
