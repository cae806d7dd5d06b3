"""Weights by the names of the authors of ViT³, H-ViT³ and T⁵ compute the published formulas."""

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmvttt.checkpoints.authors import by_our_names
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.read import open_checkpoint
from mmvttt.errors import CheckpointError
from mmvttt.models.backbones import T5, HViT3, ViT3

from ..models import published
from .pickles import save_with_yacs

CLASSES = 5
DIMS, DEPTHS, HEADS = (16, 24, 32, 48), (1, 2, 1, 1), (2, 3, 2, 4)
H_ARCH = dict(embed_dims=DIMS, depths=DEPTHS, num_heads=HEADS)
PLAIN_ARCH = dict(embed_dims=48, num_layers=3, num_heads=3, feedforward_channels=192)
T5_ARCH = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=128)
# fp32, the order of sums; the values compared are of size 1.
CLOSE = dict(rtol=1e-5, atol=1e-5)


def plain() -> dict[str, Tensor]:
    return published.random_weights(published.plain_shapes(48, 3, 3, CLASSES))


def hierarchical(classes: int = 0) -> dict[str, Tensor]:
    """With the rotary tables, as the public models save them in every block."""
    weights = published.random_weights(published.hierarchical_shapes(DIMS, DEPTHS, HEADS, classes))
    inside = '' if classes else 'attn.'
    blocks = [name.removesuffix('cpe.bias') for name in weights if name.endswith('.cpe.bias')]
    tables = {f'{name}{inside}rope.rotations': torch.zeros(4, 4, 8, 2) for name in blocks}
    return weights | tables


# Public weights, our model of them, the formula, sizes of images.
CLASSIFIERS: dict[str, tuple[Callable, Callable, Callable, list]] = {
    'ViT3': (
        plain,
        lambda: ViT3(PLAIN_ARCH, out_type='avg_featmap'),
        lambda weights, image: published.plain_logits(weights, image, depth=3, heads=3),
        [(16, 16), (48, 80)],
    ),
    'HViT3': (
        lambda: hierarchical(CLASSES),
        lambda: HViT3(H_ARCH, out_type='avg_featmap'),
        lambda weights, image: published.hierarchical_logits(weights, image, DEPTHS, HEADS),
        [(32, 32), (50, 93)],
    ),
    'T5': (
        lambda: published.random_weights(published.plain_shapes(32, 2, 2, CLASSES, 16)),
        lambda: T5(T5_ARCH, img_size=64, out_type='avg_featmap'),
        lambda weights, image: published.plain_logits(weights, image, depth=2, heads=2),
        [(64, 64)],
    ),
}


class Classifier(nn.Module):
    def __init__(self, backbone: nn.Module, channels: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.ModuleDict({'fc': nn.Linear(channels, CLASSES)})

    def forward(self, image: Tensor) -> Tensor:
        return self.head['fc'](self.backbone(image[None])[0])[0]


@pytest.mark.parametrize('prefix', ['', 'module.'])
@pytest.mark.parametrize('name', CLASSIFIERS)
def test_a_classifier_computes_the_published_formula(
    name: str, prefix: str, tmp_path: Path
) -> None:
    """By the weights that the authors evaluate: the averaged ones where there are any."""
    make, build, formula, sizes = CLASSIFIERS[name]
    weights = make()
    averaged = {n: v + 0.01 if v.dim() > 1 else v for n, v in weights.items()}
    content = {
        entry: {f'{prefix}{n}': v for n, v in tensors.items()}
        for entry, tensors in (('model', weights), ('state_dict_ema', averaged))
    }
    torch.save(dict(content, optimizer={}, max_accuracy_e=84.0), tmp_path / 'public.pth')
    ways = (({}, averaged), ({'ema': True}, averaged), ({'key': 'model'}, weights))
    for options, expected in ways:
        backbone = build()
        model = Classifier(backbone, weights['head.weight'].shape[1]).eval()
        report = load_pretrained(model, tmp_path / 'public.pth', **options)
        assert report.missing == report.unexpected == report.mismatched == []
        for size in sizes:
            image = torch.randn(3, *size, generator=torch.Generator().manual_seed(1))
            logits = formula(expected, image)
            assert logits.std() > 0.1
            with torch.no_grad():
                torch.testing.assert_close(model(image), logits, **CLOSE)


@pytest.mark.parametrize('size', [(33, 70), (5, 1)])
def test_a_detectors_backbone_computes_the_published_formula(
    size: tuple[int, int], tmp_path: Path
) -> None:
    weights = hierarchical()
    others = {'neck.lateral_convs.0.conv.weight': torch.ones(2), 'roi_head.bias': torch.ones(3)}
    content = {f'backbone.{name}': value for name, value in weights.items()} | others
    torch.save({'state_dict': content}, tmp_path / 'public.pth')
    assert torch.equal(by_our_names(content)['roi_head.bias'], torch.ones(3))
    model = HViT3(H_ARCH).eval()
    assert not load_pretrained(model, tmp_path / 'public.pth').missing
    image = torch.randn(3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        maps = model(image[None])
    features = published.hierarchical_features(weights, image, DEPTHS, HEADS)
    for ours, theirs in zip(maps, features, strict=True):
        torch.testing.assert_close(ours[0], theirs, **CLOSE)


def test_the_authors_model_gets_our_weights() -> None:
    for make, *_ in CLASSIFIERS.values():
        theirs = {name: torch.zeros_like(value) for name, value in make().items()}
        for name, value in by_our_names(theirs).items():
            value.copy_(by_our_names(make())[name])
        assert all(
            torch.equal(theirs[name], value)
            for name, value in make().items()
            if value.is_floating_point()
        )


def test_names_that_no_rule_knows_stay() -> None:
    weights = plain() | {'surprise': torch.ones(1), 'blocks.1.attn.w4': torch.ones(1)}
    ours = by_our_names(weights)
    assert ours.keys() >= {'surprise', 'backbone.blocks.1.mixer.w4'}
    assert len(ours) == len(weights)
    # Of a damaged file.
    for shape in ((), (3,)):
        damaged = weights | {'blocks.0.attn.w3': torch.ones(shape)}
        assert by_our_names(damaged)['backbone.blocks.0.mixer.w3'].shape == shape


def test_a_config_of_yacs_or_argparse_is_read_without_running_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'training.pth'
    save_with_yacs(path, monkeypatch, model=plain(), args=argparse.Namespace(lr=1))
    assert torch.equal(open_checkpoint(path).weights()['head.fc.bias'], plain()['head.bias'])
    with pytest.raises(CheckpointError):
        open_checkpoint(path).weights(ema=True)
    # The allow-list ends with the call.
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
