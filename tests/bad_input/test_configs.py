"""Wrong arguments of everything that a config can name: each is refused with its name and value."""

import copy

import pytest
import torch
from hypothesis import strategies as st
from mmengine.registry import init_default_scope
from torch import nn

import mmvttt.models.timm  # noqa: F401
from mmvttt.engine import MESAHook
from mmvttt.registry import HOOKS, MODELS

from .cases import (
    below,
    not_dicts,
    not_numbers,
    not_positive,
    not_rates,
    not_sequences,
    other_than,
    outside,
    refused,
    run_cases,
)
from .models import BASES, PLAIN

EXAMPLES = 5

small = st.integers(-9, 9)
wrong_sizes = below(1).filter(lambda v: not isinstance(v, list)) | st.lists(
    st.integers(max_value=0), max_size=3
)
wrong_indices = (
    st.sampled_from([3, -4, [0, 3], [2, 1], [1, 1], []]) | st.floats() | st.text(max_size=2)
)
wrong_backends = other_than(None, 'triton', 'numba', 'reference')
wrong_init = not_dicts.filter(bool) | st.sampled_from([{}, [{}], dict(checkpoint='a.pth')])
wrong_arch_keys = st.sets(st.sampled_from(sorted(PLAIN)), max_size=3).map(
    lambda keys: {key: PLAIN[key] for key in keys}
) | st.text(min_size=1, max_size=3).map(lambda key: {**PLAIN, key: 1})

# Argument: what is generated for it, and a word of what is allowed that the error must have.
COMMON = {
    'drop_path_rate': (not_rates.filter(lambda v: v is not None), '[0, 1)'),
    'init_cfg': (wrong_init, 'Pretrained'),
}
BACKBONE = {
    **COMMON,
    'out_type': (other_than('featmap', 'avg_featmap'), 'avg_featmap'),
    'in_channels': (below(1), 'integer'),
}
PLAIN_BACKBONE = {
    **BACKBONE,
    'arch': (other_than('tiny', 'small', 'base').filter(lambda v: v != []), 'small'),
    'arch.embed_dims': (below(1), 'integer'),
    'arch.num_layers': (below(1), 'integer'),
    'arch.num_heads': (below(1) | st.sampled_from([3, 5, 33, 64]), 'num_heads'),
    'arch.feedforward_channels': (below(1), 'integer'),
    'img_size': (wrong_sizes, 'img_size'),
    'patch_size': (below(1), 'integer'),
    'norm_eps': (not_positive, 'above 0'),
    'out_indices': (wrong_indices, 'integer'),
    'frozen_stages': (outside(-1, 3), '-1 to 3'),
}
ARGUMENTS = {
    'Vittt': {
        **PLAIN_BACKBONE,
        'design': (other_than('conv2d', 'dual'), 'conv2d'),
        'residual': (other_than('input', 'normed'), 'normed'),
        'cls_mode': (other_than('mean', 'max', 'head'), 'middle'),
        'mixer': (not_dicts, 'dict'),
        'mixer.directions': (not_sequences | st.lists(st.text(max_size=3)), 'forward'),
        'mixer.conv_kernel': (below(0), 'integer'),
        'mixer.mini_batch_size': (below(1), 'integer'),
        'mixer.learnable_states': (outside(0, 2).filter(lambda v: v is not None), '0 to 2'),
        'mixer.eta_base': (not_positive, 'above 0'),
        'mixer.inner_eps': (not_positive, 'above 0'),
        'mixer.gate_cfg': (not_dicts, 'GELU'),
        'mixer.backend': (wrong_backends, 'reference'),
    },
    'ViT3': {
        **PLAIN_BACKBONE,
        'mixer': (not_dicts, 'ViT3Mixer'),
        'mixer.scale': (not_positive, 'above 0'),
        'mixer.backend': (wrong_backends, 'reference'),
    },
    'ViT3 of the design space': {
        'mixer.inner': (not_dicts | st.none(), 'GatedFC'),
        'mixer.inner.type': (other_than('FC', 'MLP', 'Conv'), 'GatedFC'),
        'mixer.inner.ratio': (not_positive, 'above 0'),
        'mixer.inner.depth': (below(2), 'depth'),
        'mixer.inner.residual': (other_than(None, 'input', 'weight'), 'weight'),
        'mixer.loss': (other_than('dot', 'l1', 'l2'), 'smooth_l1'),
        'mixer.num_batches': (below(1), 'integer'),
        'mixer.epochs': (below(1), 'integer'),
        'mixer.step': (not_positive, 'dynamic'),
        'mixer.scale': (not_positive.filter(lambda v: v is not None), 'above 0'),
        'mixer.key_position': (wrong_sizes.filter(lambda v: v is not None), 'key_position'),
    },
    'T5': {
        **PLAIN_BACKBONE,
        'mixer': (not_dicts, 'TTTMixer'),
        'mixer.backend': (wrong_backends, 'reference'),
        'mixer.key_norm': (other_than(None, 'rms', 'layer', 'instance'), 'instance_center'),
        'mixer.locality': (other_than(None, 'dwc_v', 'dwc_qk'), 'dwc_qk'),
        'mixer.neighborhood': (
            below(1).filter(lambda v: v is not None) | st.just(4),
            'neighborhood',
        ),
    },
    'HViT3': {
        **BACKBONE,
        'arch.embed_dims': (
            not_sequences | st.tuples(*[below(1)] * 4) | st.just((16, 18, 16, 16)),
            'embed_dims',
        ),
        'arch.depths': (not_sequences | st.tuples(*[below(1)] * 4) | st.just((1, 1)), 'depths'),
        'arch.num_heads': (not_sequences | st.tuples(*[below(1)] * 4), 'num_heads'),
        'out_indices': (wrong_indices.filter(lambda v: v not in (3, -4, [0, 3])), 'out_indices'),
        'frozen_stages': (outside(-1, 4), '-1 to 4'),
        'mixer': (not_dicts.filter(lambda v: v is not None), 'ViT3Mixer'),
    },
    'ViTAdapter': {
        **COMMON,
        'backbone': (not_dicts | st.none(), 'mmvttt.Vittt'),
        'task': (other_than('det', 'seg'), "'seg'"),
        'interaction_indexes': (
            st.integers() | st.text(max_size=2) | st.lists(st.lists(small, max_size=3), max_size=4),
            'interaction_indexes',
        ),
        'deform_num_heads': (below(1).filter(lambda v: v is not None) | st.just(7), 'heads'),
        'deform_ratio': (not_positive.filter(lambda v: v is not None), 'deform_ratio'),
        'num_points': (below(1), 'integer'),
        'deform_backend': (wrong_backends, 'reference'),
        'conv_inplane': (below(1), 'integer'),
        'cffn_ratio': (not_positive, 'cffn_ratio'),
        'num_extra_extractors': (below(0), 'integer'),
        'init_values': (not_numbers | st.just(float('nan')), 'finite'),
        'out_indices': (not_sequences | st.lists(st.integers(4, 9)), 'out_indices'),
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


@pytest.mark.parametrize(
    ('base', 'path'), [(base, path) for base, paths in ARGUMENTS.items() for path in paths]
)
def test_wrong_arguments_of_models(base: str, path: str) -> None:
    values, allowed = ARGUMENTS[base][path]

    def check(value: object) -> None:
        # The last part of the path is the name of the argument; an element stands for its list.
        name = path.rpartition('.')[2] if path != 'mixer.inner.type' else 'inner'
        given = '' if isinstance(value, list | tuple | dict) else repr(value)
        refused(lambda: build(changed(BASES[base], path, value)), name, given, allowed)

    run_cases(values, check, EXAMPLES)


@pytest.mark.parametrize('base', ['Vittt', 'ViT3', 'HViT3'])
def test_keys_of_an_arch(base: str) -> None:
    run_cases(
        wrong_arch_keys,
        lambda arch: refused(lambda: build(changed(BASES[base], 'arch', arch)), 'exactly the keys'),
        EXAMPLES,
    )


def test_unknown_arguments_of_hooks() -> None:
    HOOKS.import_from_location()
    # mmengine's CheckpointHook and EMAHook hand on whatever they are given.
    hooks = sorted(set(HOOKS.module_dict) - {'CheckpointHook', 'EMAHook'})
    run_cases(
        st.tuples(st.sampled_from(hooks), st.from_regex(r'[a-z]{4}_', fullmatch=True)),
        lambda value: refused(
            lambda: HOOKS.build({'type': f'mmvttt.{value[0]}', value[1]: 1}),
            value[0],
            kind=TypeError,
        ),
        2 * len(hooks),
    )


@pytest.mark.parametrize(
    ('name', 'values', 'allowed'),
    [
        ('decay', not_rates, '[0, 1)'),
        ('start', not_rates.filter(lambda v: v != 1), '[0, 1]'),
        ('base_batch_size', below(1).filter(lambda v: not isinstance(v, list)), '1 or more'),
    ],
)
def test_mesa_hook(name: str, values: st.SearchStrategy, allowed: str) -> None:
    run_cases(
        values,
        lambda value: refused(lambda: MESAHook(**{name: value}), f'{name}={value!r}', allowed),
        EXAMPLES,
    )


def test_mesa_classifier() -> None:
    pytest.importorskip('mmpretrain')
    init_default_scope('mmpretrain')
    head = dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=32)
    base = dict(
        type='mmvttt.MESAClassifier',
        backbone=dict(BASES['Vittt'], out_type='avg_featmap'),
        head=head,
    )
    run_cases(
        st.floats(max_value=-1e-3) | st.just(float('nan')) | not_numbers,
        lambda v: refused(
            lambda: MODELS.build(dict(base, mesa_weight=v)), 'mesa_weight', repr(v), '0 or more'
        ),
        EXAMPLES,
    )
