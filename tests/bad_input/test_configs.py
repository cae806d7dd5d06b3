"""Wrong arguments of everything that a config can name: each is refused with its name and value."""

import copy

import pytest
import torch
from mmengine.registry import init_default_scope
from torch import nn

import mmvttt.models.timm  # noqa: F401
from mmvttt.openmmlab.engine import MESAHook
from mmvttt.openmmlab.registry import HOOKS, MODELS

from .cases import refused
from .models import BASES, PLAIN

NAN = float('nan')
# Wrong values of arguments of one kind.
NO_DICT = (7, 'x', [1])
NO_NAME = ('x', 7, True)
BELOW_1 = (0, 1.5, True, 'x')
NOT_POSITIVE = (0, -1.0, NAN, 'x')
NO_RATE = (-0.1, 1.0, NAN, 'x')
NO_STAGES = (None, 'x', (1, 1), (0, 1, 1, 1))
NO_ARCH = ({}, {'embed_dims': 32}, {**PLAIN, 'x': 1})

# Argument: wrong values, and a word of what is allowed that the error must have.
COMMON = {
    'drop_path_rate': (NO_RATE, '[0, 1)'),
    'init_cfg': (({}, 'x', dict(checkpoint='a.pth')), 'Pretrained'),
}
BACKBONE = {
    **COMMON,
    'out_type': (NO_NAME, 'avg_featmap'),
    'in_channels': (BELOW_1, 'integer'),
}
PLAIN_BACKBONE = {
    **BACKBONE,
    'arch': (NO_NAME, 'small'),
    'arch.embed_dims': (BELOW_1, 'integer'),
    'arch.num_layers': (BELOW_1, 'integer'),
    'arch.num_heads': ((*BELOW_1, 3, 64), 'num_heads'),
    'arch.feedforward_channels': (BELOW_1, 'integer'),
    'img_size': ((0, 'x', [0, 0], [1]), 'img_size'),
    'patch_size': (BELOW_1, 'integer'),
    'norm_eps': (NOT_POSITIVE, 'above 0'),
    'out_indices': ((3, -4, [2, 1], [1, 1], [], 0.5, 'x'), 'out_indices'),
    'frozen_stages': ((-2, 4, 0.5), '-1 to 3'),
}
ARGUMENTS = {
    'Vittt': {
        **PLAIN_BACKBONE,
        'design': (NO_NAME, 'conv2d'),
        'residual': (NO_NAME, 'normed'),
        'cls_mode': (NO_NAME, 'middle'),
        'mixer': (NO_DICT, 'TTTLinearMixer'),
        'mixer.directions': ((None, 'x', ['up']), 'forward'),
        'mixer.conv_kernel': ((-1, 1.5), 'integer'),
        'mixer.mini_batch_size': (BELOW_1, 'integer'),
        'mixer.learnable_states': ((-1, 3, 0.5), '0 to 2'),
        'mixer.eta_base': (NOT_POSITIVE, 'above 0'),
        'mixer.inner_eps': (NOT_POSITIVE, 'above 0'),
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
        'mixer.inner': ((*NO_DICT, None), 'GatedFC'),
        'mixer.inner.type': (('x', 7), 'GatedFC'),
        'mixer.inner.ratio': (NOT_POSITIVE, 'above 0'),
        'mixer.inner.depth': ((1, 2.5), 'depth'),
        'mixer.inner.residual': (NO_NAME, 'weight'),
        'mixer.loss': (NO_NAME, 'smooth_l1'),
        'mixer.num_batches': (BELOW_1, 'integer'),
        'mixer.epochs': (BELOW_1, 'integer'),
        'mixer.step': (NOT_POSITIVE, 'dynamic'),
        'mixer.scale': (NOT_POSITIVE, 'above 0'),
        'mixer.key_position': ((0, 'x', [0]), 'key_position'),
    },
    'T5': {
        **PLAIN_BACKBONE,
        'mixer': (NO_DICT, 'TTTMixer'),
        'mixer.backend': (NO_NAME, 'reference'),
        'mixer.key_norm': (NO_NAME, 'instance_center'),
        'mixer.locality': (NO_NAME, 'dwc_qk'),
        'mixer.neighborhood': ((0, 4, 'x'), 'neighborhood'),
    },
    'HViT3': {
        **BACKBONE,
        'arch.embed_dims': ((*NO_STAGES, (16, 18, 16, 16)), 'embed_dims'),
        'arch.depths': (NO_STAGES, 'depths'),
        'arch.num_heads': (NO_STAGES, 'num_heads'),
        'out_indices': (([2, 1], [1, 1], [], 0.5, 'x'), 'out_indices'),
        'frozen_stages': ((-2, 5, 0.5), '-1 to 4'),
        'mixer': (NO_DICT, 'ViT3Mixer'),
    },
    'ViTAdapter': {
        **COMMON,
        'backbone': ((*NO_DICT, None), 'Vittt'),
        'task': (NO_NAME, "'seg'"),
        'interaction_indexes': ((1, 'x', [[0, 9]], [[2, 1]]), 'interaction_indexes'),
        'deform_num_heads': ((0, 7, 'x'), 'heads'),
        'deform_ratio': (NOT_POSITIVE, 'deform_ratio'),
        'num_points': (BELOW_1, 'integer'),
        'deform_backend': (NO_NAME, 'reference'),
        'conv_inplane': (BELOW_1, 'integer'),
        'cffn_ratio': (NOT_POSITIVE, 'cffn_ratio'),
        'num_extra_extractors': ((-1, 1.5), 'integer'),
        'init_values': ((None, NAN, 'x'), 'finite'),
        'out_indices': ((None, 'x', [4]), 'out_indices'),
    },
}


def changed(base: dict, path: str, value: object) -> dict:
    """A copy of the config with another value at a dotted path."""
    config = copy.deepcopy(base)
    *parents, last = path.split('.')
    inner = config
    for key in parents:
        inner = inner[key]
    inner[last] = copy.deepcopy(value)
    return config


def build(config: dict) -> nn.Module:
    model = MODELS.build(config)
    model.init_weights()
    return model


@pytest.mark.parametrize('base', BASES)
def test_the_base_is_right(base: str) -> None:
    out = build(copy.deepcopy(BASES[base])).eval()(torch.randn(1, 3, 32, 32))
    assert all(x.isfinite().all() for x in out)


@pytest.mark.parametrize('base', ARGUMENTS)
def test_wrong_arguments_of_models(base: str) -> None:
    for path, (values, allowed) in ARGUMENTS[base].items():
        # The last part of the path is the name of the argument; an element stands for its list.
        name = path.rpartition('.')[2] if path != 'mixer.inner.type' else 'inner'
        for value in values:
            given = '' if isinstance(value, list | tuple | dict) else repr(value)
            config = changed(BASES[base], path, value)
            refused(lambda config=config: build(config), name, given, allowed)


@pytest.mark.parametrize('base', ['Vittt', 'ViT3', 'HViT3'])
def test_keys_of_an_arch(base: str) -> None:
    for arch in NO_ARCH:
        config = changed(BASES[base], 'arch', arch)
        refused(lambda config=config: build(config), 'exactly the keys')


def test_unknown_arguments_of_hooks() -> None:
    HOOKS.import_from_location()
    # mmengine's CheckpointHook and EMAHook hand on whatever they are given.
    for hook in set(HOOKS.module_dict) - {'CheckpointHook', 'EMAHook'}:
        config = {'type': f'mmvttt.{hook}', 'abcd_': 1}
        refused(lambda config=config: HOOKS.build(config), hook, kind=TypeError)


@pytest.mark.parametrize(
    ('name', 'values', 'allowed'),
    [
        ('decay', NO_RATE, '[0, 1)'),
        ('start', (-0.1, 1.5, NAN, 'x'), '[0, 1]'),
        ('base_batch_size', BELOW_1, '1 or more'),
    ],
)
def test_mesa_hook(name: str, values: tuple, allowed: str) -> None:
    for value in values:
        refused(lambda value=value: MESAHook(**{name: value}), f'{name}={value!r}', allowed)


def test_mesa_classifier() -> None:
    pytest.importorskip('mmpretrain')
    init_default_scope('mmpretrain')
    head = dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=32)
    backbone = dict(BASES['Vittt'], out_type='avg_featmap')
    for value in (-0.1, NAN, 'x', None):
        config = dict(type='mmvttt.MESAClassifier', backbone=backbone, head=head, mesa_weight=value)
        refused(lambda c=config: MODELS.build(c), 'mesa_weight', repr(value), '0 or more')
