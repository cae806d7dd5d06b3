"""T⁵ from ViTs that timm and mmpretrain build at random: exact, or refused by name."""

import re
from pathlib import Path

import pytest
import torch
from timm.layers import GluMlp
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer as Source
from torch import Tensor, nn

from mmvttt.errors import (
    CheckpointError,
    CheckpointMismatchError,
    OptionError,
    OptionTypeError,
)
from mmvttt.models.backbones import T5, ViT3
from mmvttt.models.inherit import inherit_vit, load_inherited

from .building import SOFTMAX, shaken

door = pytest.importorskip('mmvttt.openmmlab.register', exc_type=ImportError)

ARCH = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
SIZES = dict(img_size=64, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, num_classes=5)


def timm(cls: type = Source, **options) -> nn.Module:
    return shaken(cls(**{**SIZES, **options}), scale=0.3)


def mmpretrain(kind: str = 'VisionTransformer', **options) -> nn.Module:
    models = pytest.importorskip('mmpretrain.models')
    arch = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
    return shaken(getattr(models, kind)(**{'arch': arch, 'img_size': 64, **options}), scale=0.3)


WITHOUT = dict(class_token=False, global_pool='avg', fc_norm=False)
SOURCES = {
    'timm': timm,
    'timm, LayerScale, no row of the class token': lambda: timm(
        init_values=0.5, no_embed_class=True
    ),
    'timm, distilled': lambda: timm(VisionTransformerDistilled),
    'timm, no class token': lambda: timm(**WITHOUT),
    'timm, LayerScale, no class token': lambda: timm(**WITHOUT, init_values=0.5),
    'mmpretrain': mmpretrain,
    'mmpretrain, LayerScale': lambda: mmpretrain(layer_scale_init_value=0.5),
    'mmpretrain, distilled': lambda: mmpretrain('DistilledVisionTransformer'),
    'mmpretrain, no class token': lambda: mmpretrain(with_cls_token=False, out_type='raw'),
}


def t5(weights: dict[str, Tensor], tmp_path: Path, prefix: str | None = None, **options) -> T5:
    """A T⁵ from the file of a source."""
    torch.save({'model': weights}, tmp_path / 'vit.pth')
    model = T5(**{'arch': ARCH, 'img_size': 64, **options})
    load_inherited(model, checkpoint=tmp_path / 'vit.pth', prefix=prefix)
    return model.eval()


def blocks_of(source: nn.Module, x: Tensor) -> Tensor:
    """A ViT's own parts, run without its class and distillation tokens: normed tokens."""
    if isinstance(source, Source):
        x = source.patch_embed(x)
        x = x + source.pos_embed[:, -x.shape[1] :]
        return source.norm(source.blocks(x))
    x = source.patch_embed(x)[0]
    x = x + source.pos_embed[:, -x.shape[1] :]
    for layer in source.layers:
        x = layer(x)
    return source.ln1(x)


@pytest.mark.parametrize('name', SOURCES)
def test_with_softmax_put_back_it_is_the_source(name: str, tmp_path: Path, caplog) -> None:
    source = SOURCES[name]()
    weights = source.state_dict()
    caplog.set_level('INFO')
    inherited, expected = inherit_vit(weights, T5(ARCH, img_size=64)), T5(ARCH, img_size=64)
    # Every tensor of the source and of T⁵ is accounted for, once.
    assert {*inherited, *expected.new_parameters()} == {*expected.state_dict()}
    scales = 4 if 'LayerScale' in name else 0
    dropped = [n for n in weights if re.search('cls_token|dist|head', n)]
    assert all(n in caplog.text for n in dropped)
    assert len(inherited) + len(dropped) + scales == len(weights)
    model = t5(source.state_dict(), tmp_path, mixer=SOFTMAX)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        actual = model(x)[0].flatten(2).mT
        # fp32, two blocks; LayerScale is multiplied at another place.
        torch.testing.assert_close(actual, blocks_of(source, x), rtol=1e-5, atol=1e-5)
        if name.startswith('timm') and 'no class token' in name:
            pooled = model(x)[0].mean((2, 3))
            head = source.head
            torch.testing.assert_close(head(pooled), source(x), rtol=1e-5, atol=1e-5)


def test_prefixes_and_other_grids(tmp_path: Path) -> None:
    """A classifier of mmpretrain, with and without prefix, at another image size."""
    source = {f'backbone.{n}': w for n, w in mmpretrain().state_dict().items()}
    source['head.layers.head.weight'] = torch.zeros(5, 32)
    models = [t5(source, tmp_path, prefix, img_size=(64, 96)) for prefix in (None, 'backbone.')]
    for model in models:
        assert model.pos_embed.shape == (1, 24, 32)
        for name in ('patch_embed.proj.weight', 'pos_embed', 'blocks.1.mlp.fc2.bias'):
            assert torch.equal(model.state_dict()[name], models[0].state_dict()[name])


def test_a_class_token_is_not_taken_for_a_patch(tmp_path: Path) -> None:
    """4×6 patches and a class token are as many rows as 5×5 patches."""
    source = timm(img_size=(64, 96)).state_dict()
    with pytest.raises(CheckpointError, match='25 rows'):
        inherit_vit(source, T5(ARCH, img_size=64))
    model = t5(source, tmp_path, img_size=(64, 96))
    assert torch.equal(model.pos_embed, source['pos_embed'][:, 1:])
    # Without a row of the class token: told by the model's grid, or by the LayerScale of DeiT-III.
    for img_size, init_values in ((80, None), (64, 0.5)):
        bare = timm(img_size=80, no_embed_class=True, init_values=init_values).state_dict()
        actual = inherit_vit(bare, T5(ARCH, img_size=img_size))['pos_embed']
        assert torch.equal(actual, bare['pos_embed'])


def test_an_adapter_has_it_inside(tmp_path: Path) -> None:
    source = timm(depth=4).state_dict()
    torch.save(source, tmp_path / 'vit.pth')
    init_cfg = dict(type='mmvttt.InheritViT', checkpoint=str(tmp_path / 'vit.pth'))
    options = dict(conv_inplane=16, norm_cfg=dict(type='GN', num_groups=8))
    inside = dict(type='mmvttt.T5', arch=dict(ARCH, num_layers=4), img_size=64, init_cfg=init_cfg)
    model = door.ViTAdapter(backbone=inside, **options)
    model.init_weights()
    weight = model.backbone.blocks[3].mixer.qkv.weight
    assert torch.equal(weight, source['blocks.3.attn.qkv.weight'])
    outside = door.ViTAdapter(backbone=dict(inside, init_cfg=None), init_cfg=init_cfg, **options)
    with pytest.raises(OptionTypeError):
        outside.init_weights()
    with pytest.raises(OptionTypeError):
        inherit_vit(source, ViT3(ARCH))


@pytest.mark.parametrize(
    ('source', 'named'),
    [
        (lambda: timm(qk_norm=True), 'q_norm'),
        (lambda: timm(class_token=False, global_pool='avg'), 'fc_norm'),
        (lambda: timm(mlp_layer=GluMlp), 'fc2'),
        (lambda: timm(qkv_bias=False), 'qkv.bias'),
        (lambda: timm(pos_embed='none'), 'pos_embed'),
        (lambda: timm(embed_dim=48), '48), '),
        (lambda: timm(depth=3), 'blocks.2'),
        (lambda: timm(depth=1), 'blocks.1'),
        (lambda: timm(patch_size=8), '8, 8)'),
        (lambda: mmpretrain(out_type='avg_featmap'), 'ln2'),
        (lambda: T5(ARCH), 'Pretrained'),
        (lambda: nn.Sequential(nn.Linear(3, 3)), '0.bias'),
        # Damaged or strange files: another tensor, or none.
        ({'cls_token': None}, '17 rows'),
        ({'pos_embed': torch.zeros(1, 18, 32)}, '18 rows'),
        ({'pos_embed': torch.zeros(16, 32)}, '(16, 32)'),
        ({'blocks.0.attn.q_bias': torch.zeros(3)}, 'q_bias'),
        ({'norm.bias': torch.zeros(32, dtype=torch.int8)}, 'int8'),
        (
            dict.fromkeys(f'blocks.{i}.mlp.fc1.{k}' for i in (0, 1) for k in ('weight', 'bias')),
            'mlp.fc1',
        ),
        (dict.fromkeys(f'blocks.{i}.norm1.weight' for i in (0, 1)), 'norm1.weight'),
    ],
)
def test_what_cannot_be_inherited_is_refused(source, named: str) -> None:
    if isinstance(source, dict):
        changed = timm().state_dict() | source
        weights = {name: w for name, w in changed.items() if w is not None}
    else:
        weights = source().state_dict()
    with pytest.raises(CheckpointError, match=re.escape(named)):
        inherit_vit(weights, T5(ARCH, img_size=64))


@pytest.mark.parametrize(
    ('without', 'lost'),
    [('attention', 'mixer.qkv mixer.proj'), ('mlp', 'mlp.fc1 mlp.fc2')],
)
def test_partial_inheritance(without: str, lost: str, tmp_path: Path) -> None:
    """The rows of t5 Tab. 10: what is left out is initialised randomly, and all else is kept."""
    source = timm(init_values=0.5)
    torch.save({'model': source.state_dict()}, tmp_path / 'vit.pth')
    whole, part = T5(ARCH, img_size=64), T5(ARCH, img_size=64)
    before = {name: value.clone() for name, value in part.state_dict().items()}
    load_inherited(whole, checkpoint=tmp_path / 'vit.pth')
    load_inherited(part, checkpoint=tmp_path / 'vit.pth', without=without)
    names = [f'blocks.{i}.{layer}.{kind}' for i in range(2) for layer in lost.split()
             for kind in ('weight', 'bias')]  # fmt: skip
    for name, value in part.state_dict().items():
        if name in whole.new_parameters():
            continue
        kept = before if name in names else whole.state_dict()
        assert torch.equal(value, kept[name]), name
    with pytest.raises(OptionError):
        load_inherited(part, checkpoint=tmp_path / 'vit.pth', without='norm')


def test_a_vit_is_not_loaded_by_a_third(tmp_path: Path) -> None:
    """By type='Pretrained', a model would have patches and norms of it alone."""
    source = timm().state_dict()
    torch.save({'model': source}, tmp_path / 'vit.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth'))
    for backbone in (door.T5, door.ViT3, door.Vittt):
        model = backbone(ARCH, img_size=64, init_cfg=init_cfg)
        with pytest.raises(CheckpointMismatchError):
            model.init_weights()


def test_a_head_is_inherited_where_the_classes_are_as_many(tmp_path: Path) -> None:
    heads = pytest.importorskip('mmpretrain.models.heads')
    loss = dict(type='mmpretrain.CrossEntropyLoss')
    source = timm()
    torch.save({'model': source.state_dict()}, tmp_path / 'vit.pth')
    init_cfg = dict(type='mmvttt.InheritViT', checkpoint=str(tmp_path / 'vit.pth'))
    for classes in (5, 3):
        torch.manual_seed(0)
        start = [dict(type='Constant', val=0.5, layer='Linear'), init_cfg]
        head = heads.LinearClsHead(classes, 32, loss=loss, init_cfg=start)
        head.init_weights()
        expected = source.head.weight if classes == 5 else torch.full((3, 32), 0.5)
        assert torch.equal(head.fc.weight, expected)
