"""timm's vision transformers as plain backbones: timm's numbers, any weights, and every tool."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.preparation import Preparation
from mmvttt.errors import CheckpointError, CheckpointMismatchError
from mmvttt.models import TimmViT, ViTAdapter
from mmvttt.models.linearize.folder import save_pretrained

from .building import SOFTMAX, shaken

SMALL = dict(embed_dim=32, depth=4, num_heads=2)
NAMES = (
    'vit_small_patch16_dinov3',
    'vit_small_patch16_dinov3_qkvb',
    'vit_small_patch14_reg4_dinov2',
    'vit_small_patch14_dinov2',
    'deit3_small_patch16_224',
    'deit_tiny_distilled_patch16_224',
    'vit_base_patch16_siglip_224',
    'vit_base_patch16_clip_224',
    'vit_small_patch16_rope_mixed_224',
    'eva02_tiny_patch14_224',
    'vit_tiny_patch16_224',
    'vit_base_patch16_rope_reg1_gap_256',
)


def source(name: str) -> nn.Module:
    """timm's own, with its head and in its own size."""
    return shaken(timm.create_model(name, **SMALL, num_classes=5))


def backbone(name: str, path: Path, **options) -> TimmViT:
    model = TimmViT(name, model_options=SMALL, **options)
    load_pretrained(model, path)
    return model.eval()


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('linearize', [None, SOFTMAX], ids=['softmax', 'linearized'])
def test_it_is_timms(name: str, linearize: dict | None, tmp_path: Path) -> None:
    """The weights of a whole classifier of timm, at another image size, of half patches."""
    theirs = source(name)
    torch.save(theirs.state_dict(), tmp_path / 'timm.pth')
    ours = backbone(name, tmp_path / 'timm.pth', linearize=linearize)
    patch = ours.patch_size
    x = torch.randn(2, 3, 3 * patch - 5, 5 * patch - 3)
    dense = timm.create_model(
        name,
        **SMALL,
        num_classes=0,
        global_pool='token' if 'distilled' in name else '',
        dynamic_img_size=True,
        dynamic_img_pad=True,
    )
    weights = theirs.state_dict()
    if 'fc_norm.weight' in weights and isinstance(dense.fc_norm, nn.Identity):
        weights = {n.replace('fc_norm', 'norm'): w for n, w in weights.items()}
    dense.load_state_dict(weights, strict=False)
    with torch.no_grad():
        expected = dense.eval().forward_features(x)[:, dense.num_prefix_tokens :]
        actual = ours(x)[0]
    assert actual.shape == (2, 32, 3, 5)
    # The same operations in the same order.
    assert torch.equal(actual.flatten(2).mT, expected)


def test_safetensors_and_patches_of_another_size(tmp_path: Path) -> None:
    name = 'vit_small_patch14_dinov2'
    theirs = source(name)
    save_file(theirs.state_dict(), tmp_path / 'model.safetensors')
    ours = backbone(name, tmp_path / 'model.safetensors', patch_size=16, img_size=224)
    target = timm.create_model(name, **SMALL, patch_size=16, img_size=224, num_classes=0)
    expected = checkpoint_filter_fn(theirs.state_dict(), target)
    assert ours.patch_size == 16
    assert ours.pos_embed.shape == (1, 1 + 14 * 14, 32)
    assert torch.equal(ours.patch_embed.proj.weight, expected['patch_embed.proj.weight'])
    assert torch.equal(ours.pos_embed, expected['pos_embed'])


def test_its_own_weights_at_another_grid(tmp_path: Path) -> None:
    name = 'vit_tiny_patch16_224'
    wide = shaken(TimmViT(name, model_options=SMALL, img_size=96, linearize=dict()))
    torch.save(wide.state_dict(), tmp_path / 'ours.pth')
    ours = backbone(name, tmp_path / 'ours.pth', linearize=dict(), img_size=64)
    assert ours.pos_embed.shape == (1, 1 + 16, 32)
    assert torch.equal(ours.pos_embed[:, :1], wide.pos_embed[:, :1])
    expected = wide._resized(wide.pos_embed, (4, 4), (6, 6))
    torch.testing.assert_close(ours.pos_embed, expected)
    other = TimmViT(name, model_options=SMALL, img_size=64, linearize=dict())
    other.load_state_dict(wide.state_dict())
    assert torch.equal(other.pos_embed, ours.pos_embed)
    other.set_image_size((80, 96))
    assert other.to_timm().pos_embed.shape == (1, 1 + 5 * 6, 32)
    other.set_image_size(96)
    load_pretrained(other, tmp_path / 'ours.pth')
    assert torch.equal(other.pos_embed, wide.pos_embed)
    for key in ('blocks.0.attn.inner.w1', 'blocks.3.attn.q_conv.bias'):
        assert torch.equal(ours.state_dict()[key], wide.state_dict()[key])


@pytest.mark.parametrize('name', ['vit_small_patch16_dinov3', 'vit_small_patch16_rope_mixed_224'])
@pytest.mark.parametrize('inside', [False, True], ids=['alone', 'adapter'])
def test_rotary_positions_are_drawn_once_a_call(name: str, inside: bool) -> None:
    """As timm does, whose augmented positions are random in training."""
    model = TimmViT(name, model_options=SMALL)
    model = ViTAdapter(model, norm_layer='BN') if inside else model
    vit = model.backbone if inside else model
    draws = []
    get_embed = vit.rope.get_embed
    vit.rope.get_embed = lambda **options: draws.append(options) or get_embed(**options)
    model.eval()(torch.randn(1, 3, 48, 80))
    assert draws == [dict(shape=(3, 5))]


SMALL_DINO = dict(
    model='vit_small_patch16_dinov3',
    img_size=64,
    model_options=dict(embed_dim=32, depth=2, num_heads=2),
)


def test_a_folder_of_the_same_options(tmp_path: Path) -> None:
    # Shaken, as a LayerScale of 1e-5 hides the attention.
    source = shaken(TimmViT(**SMALL_DINO, linearize=dict(step=0.1)))
    save_pretrained(source.to_timm(), tmp_path)
    model = TimmViT(**SMALL_DINO, linearize=dict(inner='SwiGLU', step=0.1)).eval()
    load_pretrained(model, tmp_path)
    image = torch.randn(1, 3, 64, 96)
    (features,) = source(image)
    assert torch.equal(model(image)[0], features)
    vit = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    tokens = vit.forward_features(image)[:, model.num_prefix_tokens :]
    torch.testing.assert_close(tokens.mT.unflatten(2, (4, 6)), features)


@pytest.mark.parametrize('saved', [dict(step=0.1), dict(key_norm='rms'), dict(where=[1])])
def test_a_folder_of_other_options_is_refused(saved: dict, tmp_path: Path) -> None:
    """No tensor shows a step or a norm of the keys."""
    save_pretrained(TimmViT(**SMALL_DINO, linearize=saved).to_timm(), tmp_path)
    for given in (dict(), None):
        with pytest.raises(CheckpointMismatchError):
            load_pretrained(TimmViT(**SMALL_DINO, linearize=given), tmp_path)


# Entries of transformers' config.json that no tensor shows: this model's value, and another.
ENTRIES = {
    'num_attention_heads': (2, 4),
    'hidden_act': ('gelu', 'gelu_pytorch_tanh'),
    'layer_norm_eps': (1e-5, 1e-3),
    'rope_theta': (100.0, 1000.0),
    'key_bias': (False, True),
    'patch_size': (16, 14),
}


def test_the_config_of_a_folder_of_transformers(tmp_path: Path) -> None:
    model = TimmViT(**SMALL_DINO, linearize={}, out_type='cls_token')
    torch.save(TimmViT(**SMALL_DINO).state_dict(), tmp_path / 'pytorch_model.bin')

    def load(**config) -> None:
        (tmp_path / 'config.json').write_text(json.dumps(config))
        load_pretrained(model, tmp_path)

    of = dict(model_type='dinov3_vit')
    load(**of, **{name: ours for name, (ours, _) in ENTRIES.items()})
    load(**of, rope_parameters=dict(rope_theta=100.0))
    for name, (_, other) in ENTRIES.items():
        with pytest.raises(CheckpointMismatchError, match=name):
            load(**of, **{name: other})
    for wrong in (
        dict(of, rope_parameters=[1]),
        dict(of, layer_norm_eps='small'),
        dict(architecture='linear_vit'),
    ):
        with pytest.raises(CheckpointError, match=r'config\.json'):
            load(**wrong)
    (tmp_path / 'config.json').unlink()
    # To resize the patches is said by giving their size.
    load_pretrained(TimmViT(**SMALL_DINO, patch_size=16), tmp_path)


@pytest.mark.parametrize('where', ['timm', 'transformers', 'open_clip', 'broken', None])
def test_images_that_the_weights_were_trained_on(where: str | None, tmp_path: Path) -> None:
    torch.save(TimmViT(**SMALL_DINO).state_dict(), tmp_path / 'pytorch_model.bin')
    half, third = [0.5, 0.5, 0.5], [0.3, 0.3, 0.3]
    file, content = {
        'timm': ('config', dict(architecture='vit', pretrained_cfg=dict(mean=half, std=third))),
        'transformers': ('preprocessor_config', dict(image_mean=half, image_std=third)),
        'open_clip': ('open_clip_config', dict(preprocess_cfg=dict(mean=half, std=third))),
        'broken': ('config', dict(pretrained_cfg=dict(mean=[10**400, None], std='0.5'))),
        None: ('config', dict(architecture='vit', pretrained_cfg=None)),
    }[where]
    (tmp_path / f'{file}.json').write_text(json.dumps(content))
    report = load_pretrained(TimmViT(**SMALL_DINO), tmp_path)
    assert report.preparation == (None if where in ('broken', None) else Preparation(half, third))
    assert (f'mean={half} and std={third}' in str(report)) == (report.preparation is not None)


def test_the_norm_before_the_blocks_belongs_to_the_embedding() -> None:
    model = TimmViT('vit_base_patch16_clip_224', model_options=SMALL, frozen_stages=0)
    assert model.get_layer_depth('norm_pre.weight') == (0, 6)
    assert model.get_layer_depth('norm.weight') == (5, 6)
    assert not model.train().norm_pre.weight.requires_grad
