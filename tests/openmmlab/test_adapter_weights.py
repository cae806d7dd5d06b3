"""`init_cfg` of a ViT-Adapter and of the backbone inside it."""

import torch
from mmengine.model import BaseModule
from mmengine.registry import MODELS

from mmvttt.openmmlab.register import ViTAdapter

from ..models.adapters import GN, VITTT, PlainStub


class Stub(BaseModule, PlainStub):
    def __init__(self):
        PlainStub.__init__(self)
        self._is_init, self.init_cfg = False, None


def build(seed=0, **options):
    torch.manual_seed(seed)
    return ViTAdapter(Stub(), norm_cfg=GN, conv_inplane=8, **options)


def test_pretrained_weights_win(tmp_path):
    """The whole model's are not overwritten by the inner backbone's `init_cfg`."""
    trained = build(seed=9)
    path = tmp_path / 'weights.pth'
    torch.save(dict(state_dict=trained.state_dict()), path)
    model = build(init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    model.backbone.init_cfg = dict(type='Constant', layer='Linear', val=3.0)
    model.init_weights()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, trained.state_dict()[name], rtol=0, atol=0)


def test_backbone_takes_the_weights_of_a_plain_vittt(tmp_path):
    """All but the final norm, which the adapter has no use for; under a classifier's prefix."""
    trained = MODELS.build(VITTT)
    weights = {f'backbone.{name}': value for name, value in trained.state_dict().items()}
    path = tmp_path / 'classifier.pth'
    torch.save(dict(state_dict=weights | {'head.weight': torch.zeros(3, 64)}), path)
    pretrained = dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    model = ViTAdapter(VITTT | dict(init_cfg=pretrained), conv_inplane=8, norm_cfg=GN)
    model.init_weights()
    loaded = model.backbone.state_dict()
    assert trained.state_dict().keys() - loaded.keys() == {'norm.weight', 'norm.bias'}
    for name, value in loaded.items():
        torch.testing.assert_close(value, trained.state_dict()[name], rtol=0, atol=0)
