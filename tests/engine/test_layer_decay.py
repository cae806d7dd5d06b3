"""Rates by depth, and which parameters do not decay."""

import math

import pytest
import torch
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from mmvttt.errors import OptionError
from mmvttt.models.layers import TTTMixer
from mmvttt.openmmlab.engine import LayerDecayOptimWrapperConstructor

LR, DECAY = 0.1, 0.05
OPTIM = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=LR, weight_decay=DECAY))


class Plain(nn.Module):
    """Two blocks between an embedding and a norm: layers 0 to 3."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({'mix': nn.Linear(4, 4), 'norm': nn.LayerNorm(4)}) for _ in range(2)
        )
        self.blocks[1]['dw'] = nn.Conv2d(4, 4, 3, groups=4)
        self.w0 = nn.Parameter(torch.zeros(2, 4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(4)

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        name = param_name.removeprefix(prefix)
        if name.startswith('blocks.'):
            return int(name.split('.')[1]) + 1, 4
        return (3 if name.startswith('norm.') else 0), 4

    def no_weight_decay(self) -> set[str]:
        return {'w0'}


class Detector(nn.Module):
    """A backbone and a head."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(4, 2)


def settings(model: nn.Module, optim: dict = OPTIM, **paramwise: object) -> dict[str, tuple]:
    """Rate and decay of every parameter by name, from the optimizer that was built."""
    config = dict(
        type='mmvttt.LayerDecayOptimWrapperConstructor',
        optim_wrapper_cfg=optim,
        paramwise_cfg={'layer_decay_rate': 0.5, **paramwise},
    )
    optimizer = OPTIM_WRAPPER_CONSTRUCTORS.build(config)(model).optimizer
    by_id = {id(p): g for g in optimizer.param_groups for p in g['params']}
    assert sum(len(g['params']) for g in optimizer.param_groups) == len(by_id)
    return {
        name: (by_id[id(p)]['lr'], by_id[id(p)]['weight_decay'])
        for name, p in model.named_parameters()
        if id(p) in by_id
    }


def test_vectors_and_positions_of_a_mixer_do_not_decay() -> None:
    mixer = TTTMixer(16, 2, dict(type='GatedFC'), key_position=(3, 4), qk_affine=True)
    got = settings(Detector(nn.ModuleDict({'backbone': Plain(), 'mixer': mixer})))
    matrices = {name for name, (_, decay) in got.items() if 'mixer' in name and decay}
    assert matrices == {
        f'backbone.mixer.{name}' for name in ('qkv.weight', 'proj.weight', 'inner.w1', 'inner.w2')
    }
    # By its name, of a backbone that lists w0 alone.
    assert got['backbone.backbone.pos_embed'][1] == 0


def test_custom_keys_and_multipliers() -> None:
    got = settings(
        Detector(Plain()),
        custom_keys={
            'blocks': dict(lr_mult=4.0),
            'blocks.1.mix': dict(lr_mult=2.0, decay_mult=3.0),
            'pos_embed': dict(decay_mult=1.0),
        },
        bias_lr_mult=2.0,
        bias_decay_mult=1.0,
        norm_decay_mult=1.0,
        flat_decay_mult=1.0,
        dwconv_decay_mult=0.0,
    )
    # The longest key counts; its rate comes on top of the layer's.
    assert got['backbone.blocks.1.mix.weight'] == (LR / 2 * 2, DECAY * 3)
    assert got['backbone.blocks.0.mix.weight'] == (LR / 4 * 4, DECAY)
    assert got['backbone.pos_embed'] == (LR / 8, DECAY)
    assert got['head.bias'] == (LR * 2, DECAY)
    assert got['backbone.norm.bias'] == (LR, DECAY)
    assert got['backbone.scale'] == (LR / 8, DECAY)
    # A custom key without decay_mult leaves the rules.
    assert got['backbone.blocks.1.dw.weight'] == (LR / 2 * 4, 0)
    model = Detector(Plain())
    assert settings(model, dwconv_decay_mult=0.0)['backbone.blocks.1.dw.weight'] == (LR / 2, 0)


def test_one_group_for_each_setting() -> None:
    constructor = LayerDecayOptimWrapperConstructor(OPTIM, dict(layer_decay_rate=0.5))
    groups = constructor(Detector(Plain())).optimizer.param_groups
    # Four layers and the head, each with and without decay; the norm's layer has norms alone.
    assert len(groups) == 9
    assert [g['layer'] for g in groups] == sorted(
        (g['layer'] for g in groups), key=lambda layer: (layer is None, layer)
    )


def test_frozen_and_shared_parameters() -> None:
    model = Detector(Plain())
    model.backbone.embed.requires_grad_(False)
    model.tied = model.head
    got = settings(model)
    assert not any(name.startswith('backbone.embed') for name in got)
    assert got['head.weight'] == (LR, DECAY)


@pytest.mark.parametrize(
    'given',
    [
        *(dict(layer_decay_rate=rate) for rate in (None, 0, 1.5)),
        dict(num_layers=12),
        *(dict(custom_keys=keys) for keys in (3, dict(gamma=3), dict(hed=dict(lr_mult=0)))),
        dict(norm_decay_mult=math.nan),
        *(dict(new_lr_mult=factor) for factor in (0, 20)),
        *(dict(optim=dict(optimizer=options)) for options in (dict(type='AdamW'), dict(lr=LR))),
    ],
    ids=str,
)
def test_wrong_settings(given: dict) -> None:
    # mmengine's own check of custom_keys comes first.
    with pytest.raises((OptionError, TypeError)):
        settings(Detector(Plain()), **given)


def test_a_backbone_without_depth() -> None:
    for model in (Detector(nn.Linear(4, 4)), nn.Linear(4, 4)):
        with pytest.raises(OptionError):
            settings(model)
