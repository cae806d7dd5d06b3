"""Effective receptive fields: exact zeros at random weights; squares by hand; levels of an FPN."""

import pytest
import timm
import torch
from torch import Tensor, nn

from mmvttt.analysis.mixers import record_mixers
from mmvttt.analysis.receptive_field import (
    ReceptiveField,
    feature_maps,
    last_map,
    receptive_fields,
)
from mmvttt.by_name import find_model
from mmvttt.errors import UsageError
from mmvttt.models import timm as _registers  # noqa: F401
from mmvttt.models.backbones import T5, HViT3, ViT3, Vittt
from mmvttt.models.backbones.vittt import DESIGN_ROUTE

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
STAGES = dict(embed_dims=(8, 16), depths=(1, 1), num_heads=(1, 2))


@pytest.mark.parametrize('design', DESIGN_ROUTE)
def test_one_direction_sees_nothing_behind_the_centre(design: str) -> None:
    """Of 5 × 5 patches of 16 pixels, in raster order."""
    torch.manual_seed(0)
    model = Vittt(dict(ARCH, num_layers=4), design=design, img_size=80).double()
    actual = receptive_fields(model, torch.randn(2, 3, 80, 80, dtype=torch.float64))['backbone']
    assert actual.map_size == (5, 5)
    assert actual.field.max() == 1
    seen = nn.functional.max_pool2d(actual.field[None], 16).flatten() > 0
    assert seen[:13].all()
    assert seen[13:].all() if design in ('dual', 'conv2d') else not seen[13:].any()


def test_it_is_the_mean_over_images() -> None:
    """A convolution's: |Σ of the taps| of the channels that relu lets through, summed."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 2, 3, padding=1, bias=False).train()
    images = torch.randn(3, 3, 5, 5)
    total = torch.zeros(5, 5)
    for image in images:
        x = image[None].requires_grad_()
        out = model(x)[0, :, 2, 2]
        taps = sum(model.weight[f] for f in range(2) if out[f] > 0)
        total[1:4, 1:4] += taps.abs().sum(0) if torch.is_tensor(taps) else 0
    actual = receptive_fields(model, images)['backbone']
    torch.testing.assert_close(actual.field, (total / total.max()).detach())
    assert model.training
    assert model.weight.grad is None


def test_sides_by_hand() -> None:
    field = torch.zeros(6, 8)
    field[3, 4] = 1.0
    # A map of 3 × 4 cells: the middle of cell (1, 2) lies between pixels, at (3, 5).
    actual = ReceptiveField(field, (3, 4))
    assert actual.middle == (3, 5)
    assert actual.sides((0.01, 0.5, 1.0)) == [2, 2, 2]
    field[2, 7] = 0.5  # columns 7 to 8 lie 3 from the middle
    field[0, 0] = 0.5  # columns 0 to 1 lie 5 from it
    assert actual.sides((0.5, 0.51, 0.75, 0.76, 1.0)) == [2, 6, 6, 10, 10]
    odd = ReceptiveField(torch.ones(9, 9), (3, 3))
    assert odd.sides((1 / 81, 9 / 81, 10 / 81, 1.0)) == [1, 3, 5, 9]


class Classifier(nn.Module):
    """The part of a toolbox's classifier that the function uses."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = ViT3(ARCH, out_type='avg_featmap')

    def extract_feat(self, images: Tensor) -> Tensor:
        return self.backbone(images)[-1]


@pytest.mark.parametrize(
    'model',
    [
        lambda: Vittt(ARCH, img_size=64, out_type='avg_featmap', cls_mode='double'),
        lambda: HViT3(STAGES, out_type='avg_featmap'),
        Classifier,
        lambda: timm.create_model('vittt_tiny_patch16_224', arch=ARCH),
        lambda: timm.create_model('resnet10t'),
        lambda: find_model('vit_tiny_patch16_224', dict(depth=1)).model,
    ],
)
def test_models_have_a_last_map(model) -> None:
    model = model().eval()
    before = getattr(model, 'out_type', None)
    with torch.no_grad():
        actual = last_map(model, torch.randn(1, 3, 64, 96))
    # Strides: 16 of patches, 8 of two stages, 32 of a ResNet.
    assert tuple(actual.shape[2:]) in ((4, 6), (8, 12), (2, 3))
    assert getattr(model, 'out_type', None) == before


def test_what_has_no_map_is_refused() -> None:
    image = torch.randn(1, 3, 8, 8)
    with pytest.raises(UsageError):
        receptive_fields(nn.Sequential(nn.Flatten()), image)
    dead = nn.Conv2d(3, 2, 1)
    nn.init.zeros_(dead.weight)
    with pytest.raises(UsageError):
        receptive_fields(dead, image)


class Detector(Classifier):
    """A backbone and a neck of two levels, the finer one copied from the image's own cells."""

    with_neck = True

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.AvgPool2d(8))
        self.backbone.forward = lambda x: (nn.functional.avg_pool2d(x, 8),)
        self.neck = lambda maps: (nn.functional.interpolate(maps[0], scale_factor=2), maps[0])


def test_levels_of_a_neck_are_called_by_their_stride() -> None:
    image = torch.rand(1, 3, 32, 48)
    assert [(n, tuple(x.shape[2:])) for n, x in feature_maps(Detector(), image).items()] == [
        ('backbone', (4, 6)),
        ('P2', (8, 12)),
        ('P3', (4, 6)),
    ]
    actual = receptive_fields(Detector(), image)
    # All three are copies of one average over 8×8 pixels.
    for name in ('backbone', 'P2', 'P3'):
        assert (actual[name].field > 0).sum() == 64, name
    assert actual['P2'].sides((0.99,)) == [16 - 4]


def test_out_of_memory_names_the_option() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError('too much')

    with pytest.raises(UsageError):
        receptive_fields(Large(), torch.rand(1, 3, 8, 8))


def test_looking_leaves_nothing_behind() -> None:
    model = T5(ARCH, img_size=48)
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    images = torch.rand(2, 3, 48, 33)
    receptive_fields(model, images)
    assert [m.name for m in record_mixers(model, images)] == ['blocks.0.mixer', 'blocks.1.mixer']
    assert [module.training for module in model.modules()] == modes
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not vars(module).keys() & {'mix', 'shape_keys'}
