"""Wrong arguments in configs, besides those of test_contract.py: each is named with its value."""

import copy

import pytest
from mmengine.registry import init_default_scope
from torch import nn

import mmvttt.models.timm  # noqa: F401
from mmvttt.errors import OptionError
from mmvttt.openmmlab.engine import MESAHook
from mmvttt.openmmlab.registry import HOOKS, MODELS

from ..models.building import CASES
from .cases import refused

DESIGN_SPACE = dict(type='mmvttt.TTTMixer', inner=dict(type='MLP'))
BASES = CASES | {'ViT3 of the design space': dict(CASES['ViT3'], mixer=DESIGN_SPACE)}

NAN = float('nan')
# Wrong values of arguments of one kind.
NO_DICT = (7, 'x', [1])
NO_NAME = ('x', 7, True)
BELOW_1 = (0, 1.5, True, 'x')
NOT_POSITIVE = (0, -1.0, NAN, 'x')
NO_RATE = (-0.1, 1.0, NAN, 'x')

# Argument: wrong values, and a word of what is allowed that the error must have.
INIT = {'init_cfg': (({}, 'x', dict(checkpoint='a.pth')), 'Pretrained')}
PLAIN_BACKBONE = {
    **INIT,
    'drop_path_rate': (NO_RATE, '[0, 1)'),
    'in_channels': (BELOW_1, 'integer'),
    'arch.embed_dims': (BELOW_1, 'integer'),
    'arch.num_layers': (BELOW_1, 'integer'),
    'arch.feedforward_channels': (BELOW_1, 'integer'),
    'img_size': ((0, 'x', [0, 0], [1]), 'img_size'),
    'patch_size': (BELOW_1, 'integer'),
}
ARGUMENTS = {
    'Vittt': {
        **PLAIN_BACKBONE,
        'mixer': (NO_DICT, 'TTTLinearMixer'),
        'mixer.eta_base': (NOT_POSITIVE, 'above 0'),
        'mixer.gate_cfg': (NO_DICT, 'GELU'),
        'mixer.backend': (NO_NAME, 'reference'),
    },
    'ViT3': {
        **PLAIN_BACKBONE,
        'mixer': (NO_DICT, 'ViT3Mixer'),
        'mixer.scale': (NOT_POSITIVE, 'above 0'),
        'mixer.backend': (NO_NAME, 'reference'),
    },
    'ViT3 of the design space': {
        'mixer.inner.type': (('x', 7), 'GatedFC'),
        'mixer.inner.ratio': (NOT_POSITIVE, 'above 0'),
        'mixer.inner.depth': ((1, 2.5), 'depth'),
        'mixer.inner.residual': (NO_NAME, 'weight'),
        'mixer.num_batches': (BELOW_1, 'integer'),
        'mixer.epochs': (BELOW_1, 'integer'),
        'mixer.step': (NOT_POSITIVE, 'dynamic'),
        'mixer.scale': (NOT_POSITIVE, 'above 0'),
        'mixer.key_position': ((0, 'x', [0]), 'key_position'),
    },
    'T5': {**PLAIN_BACKBONE, 'mixer.backend': (NO_NAME, 'reference')},
    'HViT3': {
        **INIT,
        'in_channels': (BELOW_1, 'integer'),
        'arch.embed_dims': ((None, 'x', (0, 1, 1, 1), (16, 18, 16, 16)), 'embed_dims'),
        'mixer': (NO_DICT, 'ViT3Mixer'),
    },
    'ViTAdapter': {
        **INIT,
        'backbone': ((*NO_DICT, None), 'Vittt'),
        'deform_backend': (NO_NAME, 'reference'),
    },
}


def changed(base: dict, path: str, value: object) -> dict:
    """A copy of the config with another value at a dotted path."""
    config = copy.deepcopy(base)
    *parents, last = path.split('.')
    inner = config
    for key in parents:
        inner = inner.setdefault(key, {})
    inner[last] = copy.deepcopy(value)
    return config


def build(config: dict) -> nn.Module:
    model = MODELS.build(config)
    model.init_weights()
    return model


@pytest.mark.parametrize('base', ARGUMENTS)
def test_wrong_arguments_of_models(base: str) -> None:
    for path, (values, allowed) in ARGUMENTS[base].items():
        # The last part of the path is the name of the argument; an element stands for its list.
        name = path.rpartition('.')[2] if path != 'mixer.inner.type' else 'inner'
        for value in values:
            given = '' if isinstance(value, list | tuple | dict) else repr(value)
            config = changed(BASES[base], path, value)
            refused(lambda config=config: build(config), name, given, allowed)


def test_unknown_arguments_of_hooks() -> None:
    HOOKS.import_from_location()
    # mmengine's EMAHook hands on whatever it is given.
    for hook in set(HOOKS.module_dict) - {'EMAHook'}:
        config = {'type': f'mmvttt.{hook}', 'abcd_': 1}
        refused(lambda config=config: HOOKS.build(config), hook, kind=TypeError)


def test_mesa_hook() -> None:
    for name, values in (('decay', NO_RATE), ('start', (-0.1, NAN)), ('base_batch_size', BELOW_1)):
        for value in values:
            refused(lambda o={name: value}: MESAHook(**o), f'{name}={value!r}', kind=OptionError)


def test_mesa_classifier() -> None:
    pytest.importorskip('mmpretrain')
    init_default_scope('mmpretrain')
    head = dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=32)
    backbone = dict(BASES['Vittt'], out_type='avg_featmap')
    for value in (-0.1, NAN, 'x', None):
        config = dict(type='mmvttt.MESAClassifier', backbone=backbone, head=head, mesa_weight=value)
        refused(lambda c=config: MODELS.build(c), 'mesa_weight', repr(value), '0 or more')
