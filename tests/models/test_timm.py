"""Every model of ours in timm's registry, by the contract that timm's own models are held to."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay
from torch.utils.flop_counter import FlopCounterMode

import mmvttt.models.timm  # noqa: F401 - registers the models
from mmvttt.errors import CheckpointMismatchError, OptionError
from mmvttt.models.backbones import HViT3

from ..checkpoints.pickles import save_with_yacs
from . import published
from .building import PLAIN, STAGES

MODELS = timm.list_models(module='timm')
# One model a family, for what does not depend on the size.
FAMILIES = [
    'vittt_tiny_patch16_224',
    'vit3_tiny_patch16_224',
    't5_tiny_patch16_224',
    'h_vit3_tiny',
]
# vision-ttt Tab. 1 with Eq. 13; vit3 Tab. 11 and 12 and the public code; t5 Tab. 4: millions of
# parameters, 10⁹ multiply-accumulates at 224². Ours counts products and convolutions.
SIZES = {
    'vittt_tiny_patch16_224': (6.976, 1.445),
    'vittt_small_patch16_224': (26.365, 5.318),
    'vittt_base_patch16_224': (102.385, 20.347),
    'vit3_tiny_patch16_224': (6.1494, 1.2235),
    'vit3_small_patch16_224': (23.7994, 4.817),
    'vit3_base_patch16_224': (90.0559, 17.956),
    't5_tiny_patch16_224': (6.2055, 1.3378),
    't5_small_patch16_224': (23.0268, 4.7565),
    't5_base_patch16_224': (88.5199, 17.8365),
    'h_vit3_tiny': (28.7036, 4.920),
    'h_vit3_small': (54.3621, 8.760),
    'h_vit3_base': (94.3693, 16.723),
}
# Vittt's depth-wise convolutions and η are beyond Eq. 13.
COUNTED_ALIKE = {'vittt': 0.01, 'vit3': 0.005, 't5': 1e-4, 'h': 0.005}
SHIPPED = 'vittt_nano_patch4_32'


def reduced(name: str, **kwargs) -> torch.nn.Module:
    torch.manual_seed(0)
    if name.startswith('h_'):
        return timm.create_model(name, arch=STAGES, **kwargs)
    return timm.create_model(name, arch=PLAIN, img_size=64, **kwargs)


def test_all_models_are_registered() -> None:
    assert set(MODELS) == {*SIZES, SHIPPED}
    pretrained = {name.partition('.')[0] for name in timm.list_pretrained()}
    tagged = {name for name in MODELS if 'vit3' in name}
    assert pretrained & set(MODELS) == {SHIPPED, *tagged}


def test_shipped_weights_answer_as_they_did_when_they_were_made() -> None:
    model = timm.create_model(SHIPPED, pretrained=True).eval()
    x = torch.linspace(-1, 1, 32)
    image = torch.stack([x.expand(32, 32), x.view(-1, 1).expand(32, 32), x.view(-1, 1) * x])
    # In fp64, by the file of top-1 81.0.
    expected = [-0.0025, -4.3110, 0.9756, 0.1999, 4.8559, 0.5853, 0.0428, -0.5625, -2.1572, -2.0413]
    with torch.inference_mode():
        torch.testing.assert_close(model(image[None])[0], torch.tensor(expected), atol=2e-4, rtol=0)


@pytest.mark.parametrize('name', SIZES)
def test_sizes_of_the_papers(name: str) -> None:
    with torch.device('meta'):
        model = timm.create_model(name).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 224, 224))
    millions, giga = SIZES[name]
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=5e-4)
    rel = COUNTED_ALIKE[name.partition('_')[0]]
    assert counter.get_total_flops() / 2e9 == pytest.approx(giga, rel=rel)


@pytest.mark.parametrize('name', FAMILIES)
def test_config_and_head(name: str) -> None:
    with torch.device('meta'):
        model = timm.create_model(name, num_classes=10)
        x = torch.empty(2, 3, 64, 96)
        config = resolve_model_data_config(model)
        assert config['input_size'] == (3, 224, 224)
        # The same classes of parameters as the config names.
        state = model.state_dict()
        assert f'{model.pretrained_cfg["first_conv"]}.weight' in state
        assert f'{model.pretrained_cfg["classifier"]}.weight' in state
        model.eval()
        features = model.forward_features(x)
        assert features.shape[:2] == (2, model.num_features)
        pooled = model.forward_head(features, pre_logits=True)
        assert pooled.shape == (2, model.num_features)
        assert model(x).shape == (2, 10)
        assert model.get_classifier().out_features == model.num_classes == 10
        model.reset_classifier(7)
        assert model(x).shape == (2, 7) == (2, model.num_classes)
        model.reset_classifier(0)
        assert model(x).shape == (2, model.num_features)
        model.reset_classifier(0, '')
        assert model(x).shape == features.shape


@pytest.mark.parametrize('name', FAMILIES)
def test_pyramid_of_features(name: str) -> None:
    with torch.device('meta'):
        model = timm.create_model(name, features_only=True).eval()
        maps = model(torch.empty(2, 3, 96, 64))
    info = model.feature_info
    assert [m.shape[1] for m in maps] == info.channels()
    for features, stride in zip(maps, info.reduction(), strict=True):
        assert features.shape[2:] == (96 // stride, 64 // stride)
    assert len(maps) == (4 if name.startswith('h_') else 3)


@pytest.mark.parametrize('name', FAMILIES)
def test_groups_of_parameters(name: str) -> None:
    with torch.device('meta'):
        model = timm.create_model(name)
    names = {n for n, _ in model.named_parameters()}
    groups = group_parameters(model, model.group_matcher())
    assert {n for members in groups.values() for n in members} == names
    blocks = [m for n, m in model.named_modules() if n.rpartition('.')[0].endswith('blocks')]
    # The embedding, a group for each block, what is behind them.
    assert len(groups) == len(blocks) + 2
    assert all('head' in n or '.norm' in n for n in groups[len(blocks) + 1])
    coarse = group_parameters(model, model.group_matcher(coarse=True))
    assert len(coarse) <= len(groups)
    assert model.no_weight_decay() <= names
    scales = {g['lr_scale'] for g in param_groups_layer_decay(model, layer_decay=0.5)}
    assert len(scales) == len(groups)


@pytest.mark.parametrize('name', FAMILIES)
def test_intermediates_are_those_of_the_forward_pass(name: str) -> None:
    model = reduced(name).eval()
    x = torch.randn(1, 3, 64, 80)
    with torch.no_grad():
        final, features = model.forward_intermediates(x)
        torch.testing.assert_close(final, model.forward_features(x), rtol=0, atol=0)
        assert len(features) == len(model.feature_info)
        (last,) = model.forward_intermediates(
            x, [-2], stop_early=True, output_fmt='NLC', intermediates_only=True
        )
        tokens = features[-2].flatten(2).transpose(1, 2)
        torch.testing.assert_close(last, tokens, rtol=0, atol=0)
        both = model.forward_intermediates(x, [-2], output_dict=True)
        assert torch.equal(both['image_features'], final)
        assert torch.equal(both['image_intermediates'][0], features[-2])
        assert torch.equal(model.get_intermediate_layers(x, [-2])[0], tokens)
        pruned = reduced(name, features_only=True, out_indices=(1,))
        pruned.model.load_state_dict(model.state_dict(), strict=False)
        torch.testing.assert_close(pruned.eval()(x)[0], features[1], rtol=0, atol=0)
        model.prune_intermediate_layers([1], prune_norm=True)
        assert torch.equal(model(x), features[1])
        assert torch.equal(model.forward_features(x), features[1])
        if not name.startswith('h_'):
            assert torch.equal(model.backbone(x)[0], features[1])
    parts = model.backbone.stages if name.startswith('h_') else [model.backbone]
    for enable in (True, False):
        model.set_grad_checkpointing(enable)
        assert all(part.with_cp is enable for part in parts)


def test_the_input_size_can_be_set() -> None:
    model = reduced('vittt_tiny_patch16_224', frozen_stages=0).eval()
    x = torch.randn(1, 3, 96, 32)
    expected = model(x)
    model.set_input_size((96, 32))
    assert model.backbone.grid == (6, 2)
    assert not model.backbone.pos_embed.requires_grad
    # The position embedding is resized once, not for every image.
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_stages_take_any_size_and_norm_the_last() -> None:
    model = reduced('h_vit3_tiny', img_size=96).eval()
    x = torch.randn(2, 3, 64, 96)
    expected = model(x)
    model.set_input_size((64, 96))
    final, raw = model.forward_intermediates(x)
    _, normed = model.forward_intermediates(x, norm=True)
    assert torch.equal(model(x), expected)
    assert all(torch.equal(a, b) for a, b in zip(raw[:-1], normed[:-1], strict=True))
    assert torch.equal(normed[-1], final)
    assert not torch.equal(raw[-1], final)


@pytest.mark.parametrize(
    'call',
    [
        *(partial(reduced, 'vittt_tiny_patch16_224', cls_mode=mode) for mode in ('head', 'max')),
        partial(reduced, 'h_vit3_tiny', num_classes=-3),
        lambda: reduced('vittt_tiny_patch16_224').reset_classifier(-3),
        lambda: reduced('h_vit3_tiny').forward_intermediates(torch.zeros(1), output_fmt='NHWC'),
    ],
)
def test_bad_options(call: Callable) -> None:
    with pytest.raises(OptionError):
        call()


def test_published_weights_by_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the authors' names, averaged, with timm's changes of channels and classes."""
    arch = HViT3.arch_zoo['tiny']
    sizes = (arch[key] for key in ('embed_dims', 'depths', 'num_heads'))
    weights = published.random_weights(published.hierarchical_shapes(*sizes, classes=1000))
    raw = {name: torch.zeros_like(value) for name, value in weights.items()}
    path = tmp_path / 'hvit3_t_mesa_in1k.pth'
    save_with_yacs(path, monkeypatch, model=raw, state_dict_ema=weights)
    monkeypatch.setenv('MMVTTT_WEIGHTS', str(tmp_path))
    overlay = dict(file=str(path))
    models = [
        timm.create_model('h_vit3_tiny.mesa_in1k', pretrained=True),
        timm.create_model('h_vit3_tiny', pretrained=True, pretrained_cfg_overlay=overlay),
        timm.create_model('h_vit3_tiny', checkpoint_path=str(path)),
    ]
    for model in models:
        assert 'state_dict' not in model.pretrained_cfg
        for name, value in models[0].state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(model.head.fc.weight, weights['head.weight'])
    stem = weights['patch_embed.conv.0.conv.weight']
    other = timm.create_model('h_vit3_tiny', pretrained=True, in_chans=1, num_classes=3)
    torch.testing.assert_close(other.backbone.stem[0].conv.weight, stem.sum(1, keepdim=True))
    features = timm.create_model('h_vit3_tiny', pretrained=True, features_only=True)
    assert torch.equal(features.model.backbone.stem[0].conv.weight, stem)
    with pytest.raises(CheckpointMismatchError):
        timm.create_model('h_vit3_small', pretrained=True, pretrained_cfg_overlay=overlay)
