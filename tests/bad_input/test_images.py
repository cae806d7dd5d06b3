"""Images that a backbone cannot take are refused; numbers that are not finite stay in theirs."""

import copy
import math

import pytest
import torch
from torch import nn

from mmvttt.openmmlab.registry import MODELS

from .cases import refused
from .models import BASES

NAMES = ('Vittt', 'ViT3', 'T5', 'HViT3', 'ViTAdapter')
WRONG_SHAPES = (
    *((1, 4, 32, 32), (1, 0, 32, 32), (1, 3, 0, 40), (0, 3, 33, 32)),
    *((), (3, 32, 32), (1, 3, 1, 32, 32)),
)


@pytest.fixture(scope='module', params=NAMES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS.build(copy.deepcopy(BASES[request.param])).eval()


def test_wrong_shapes_and_types(model: nn.Module) -> None:
    for shape in WRONG_SHAPES:
        image = torch.zeros(shape)
        allowed = 'an empty batch' if shape[:1] == (0,) else '(B, 3, H, W)'
        refused(lambda x=image: model(x), allowed, str(shape), kind=ValueError)
    for dtype in (torch.uint8, torch.int64, torch.bool):
        image = torch.ones(1, 3, 32, 32, dtype=dtype)
        refused(lambda x=image: model(x), str(image.dtype), 'normalise', kind=TypeError)


@torch.no_grad()
def test_nan_stays_in_its_image_and_is_seen(model: nn.Module) -> None:
    clean = torch.randn(2, 3, 33, 40, generator=torch.Generator().manual_seed(0))
    expected = model(clean)
    for number, row, column in ((math.nan, 0, 0), (math.inf, 32, 39), (-math.inf, 17, 5)):
        image = clean.clone()
        image[0, :, row, column] = number
        maps = model(image)
        # A number that is not finite reaches the last map, and no other image.
        assert not maps[-1][0].isfinite().all()
        for a, b in zip(maps, expected, strict=True):
            torch.testing.assert_close(a[1], b[1], rtol=0, atol=1e-5)
