"""An empty batch is an error; numbers that are not finite stay in their image."""

import copy
import math

import pytest
import torch
from torch import nn

from mmvttt.openmmlab.registry import MODELS

from ..models.building import CASES
from .cases import refused


@pytest.fixture(scope='module', params=['Vittt', 'ViT3', 'T5', 'HViT3', 'ViTAdapter'])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS.build(copy.deepcopy(CASES[request.param])).eval()


def test_an_empty_batch(model: nn.Module) -> None:
    refused(lambda: model(torch.zeros(0, 3, 33, 32)), 'an empty batch', kind=ValueError)


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
