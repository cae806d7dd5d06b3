"""`init_cfg` of a ViT-Adapter and of the backbone inside it."""

import torch
from mmengine.model import BaseModule

from mmvttt.openmmlab.register import ViTAdapter

from ..models.adapters import GN, PlainStub


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
