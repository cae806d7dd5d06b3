"""Distillation of a linearized model from its source: losses, tokens, and what is new."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import nn

from mmvttt.errors import OptionError, OptionTypeError
from mmvttt.models.backbones import TimmViT
from mmvttt.models.distillation import block_tokens, distillation_losses, new_parameters
from mmvttt.models.linearize import linearize

from .building import SOFTMAX

OPTIONS: dict[str, Any] = dict(
    model='vit_small_patch16_dinov3',
    model_options=dict(embed_dim=32, depth=3, num_heads=2),
    img_size=32,
)


def source_and_twin() -> tuple[TimmViT, TimmViT]:
    torch.manual_seed(0)
    source, twin = TimmViT(**OPTIONS).eval(), TimmViT(**OPTIONS, linearize=dict())
    for parameter in source.parameters():
        # LayerScale of 1e-5 would leave nothing to learn.
        nn.init.normal_(parameter, std=0.3)
    twin.load_state_dict(source.state_dict(), strict=False)
    return source, twin


def test_the_losses_are_those_of_their_names() -> None:
    source, twin = source_and_twin()
    images = torch.randn(2, 3, 32, 48)
    target, tokens = (block_tokens(m, images)[-1] for m in (source, twin))
    expected = {'nmse': 0.0, 'cosine': 0.0, 'smooth_l1': 0.0}
    for part in (slice(0, 5), slice(5, None)):
        t, s = target[:, part], tokens[:, part]
        variance = ((t - t.mean((0, 1))) ** 2).sum()
        expected['nmse'] += ((s - t) ** 2).sum() / variance / 2
        expected['cosine'] += (1 - nn.CosineSimilarity(-1)(s, t).mean()) / 2
        scale = (variance / t.numel()).sqrt()
        expected['smooth_l1'] += nn.SmoothL1Loss()(s / scale, t / scale) / 2
    for loss, value in expected.items():
        actual = distillation_losses(source, twin, images, loss, 'last')
        # The tiny share of the power that keeps the variance off 0.
        torch.testing.assert_close(actual['loss_distil'], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            actual['explained_last'], 1 - expected['nmse'], rtol=1e-4, atol=1e-4
        )
    assert list(actual)[1:] == ['explained_0', 'explained_1', 'explained_2', 'explained_last']
    with pytest.raises(OptionError):
        distillation_losses(source, twin, images, depths=(7,))


@pytest.mark.parametrize('blockwise', [False, True])
def test_softmax_put_back_is_explained_whole(blockwise: bool) -> None:
    source, _ = source_and_twin()
    same = TimmViT(**OPTIONS, linearize=SOFTMAX)
    same.load_state_dict(source.state_dict())
    images = torch.randn(2, 3, 48, 32)
    actual = distillation_losses(source, same, images, depths=(2,), blockwise=blockwise)
    assert actual['loss_distil'].item() < 1e-10
    actual['loss_distil'].backward()
    # Blockwise, a block learns from itself alone.
    learned = {n[:8] for n, p in same.named_parameters() if p.grad is not None}
    assert (learned == {'blocks.2'}) is blockwise
    assert min(v for n, v in actual.items() if 'explained' in n) > 1 - 1e-6


def test_a_class_token_needs_two_images() -> None:
    """Over one image it has no variance, by which its error is divided."""
    small = dict(embed_dim=32, depth=2, num_heads=2, img_size=32)
    source = timm.create_model('vit_tiny_patch16_224', **small).eval()
    twin = timm.create_model('vit_tiny_patch16_224', **small)
    linearize(twin)
    images = torch.randn(2, 3, 32, 32)
    assert distillation_losses(source, twin, images)['loss_distil'].isfinite()
    with pytest.raises(OptionError):
        distillation_losses(source, twin, images[:1])


@pytest.mark.parametrize(
    ('name', 'prefix'),
    [('vit_base_patch16_siglip_224', 0), ('vit_small_patch16_dinov3', 5)],
)
def test_tokens_of_a_model_of_timm(name: str, prefix: int) -> None:
    small = dict(embed_dim=32, depth=2, num_heads=2, num_classes=0, dynamic_img_size=True)
    model = timm.create_model(name, **small).eval()
    linearize(model)
    actual: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *args: actual.append(args[2]))
    images = torch.randn(3, 3, 32, 48)
    tokens = block_tokens(model, images)
    assert [t.shape for t in tokens] == [(3, prefix + 6, 32)] * 3
    assert all(torch.equal(*pair) for pair in zip(tokens[:2], actual, strict=True))
    assert torch.equal(tokens[2], model.forward_features(images))


class _Saved(nn.Module):
    """PEFT's wrapper of a module that is trained whole."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module.requires_grad_(False)
        trained = copy.deepcopy(module).requires_grad_(True)
        self.modules_to_save = nn.ModuleDict(dict(default=trained))
        self.forward = trained.forward

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.modules_to_save['default'], name)


def test_what_is_new_in_a_twin_of_peft() -> None:
    source, twin = source_and_twin()
    assert new_parameters(source) == set()
    assert new_parameters(twin) == set(twin.linearization.new)
    twin.requires_grad_(False)
    for block in twin.blocks:
        for name in twin.linearization.modules_to_save:
            setattr(block.attn, name, _Saved(getattr(block.attn, name)))
    trained = {n for n, p in twin.named_parameters() if p.requires_grad}
    assert trained <= new_parameters(twin)
    distillation_losses(source, twin, torch.randn(2, 3, 32, 32))['loss_distil'].backward()
    assert {n for n, p in twin.named_parameters() if p.grad is not None} == trained


def test_a_source_of_another_precision_and_a_wrapper() -> None:
    source, twin = source_and_twin()
    images = torch.randn(2, 3, 32, 32)
    expected = distillation_losses(source, twin, images)['loss_distil']
    actual = distillation_losses(source.bfloat16(), twin, images)['loss_distil']
    # bf16 has 8 bits.
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=0)
    with pytest.raises(OptionTypeError):
        block_tokens(torch.compile(source), images)
