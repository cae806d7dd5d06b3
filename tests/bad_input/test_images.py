"""Images that a backbone cannot take are refused; numbers that are not finite stay in theirs."""

import copy
import math

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from mmvttt.registry import MODELS

from .cases import refused, run_cases
from .models import BASES

NAMES = ('Vittt', 'ViT3', 'T5', 'HViT3', 'ViTAdapter')
every_backbone = pytest.mark.parametrize('name', NAMES)


@pytest.fixture(scope='module')
def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: MODELS.build(copy.deepcopy(BASES[name])).eval() for name in NAMES}


wrong_shapes = st.one_of(
    st.tuples(st.just(1), st.sampled_from([0, 1, 2, 4]), st.just(32), st.just(32)),
    st.tuples(st.just(1), st.just(3), st.just(0), st.integers(0, 40)),
    st.tuples(st.just(0), st.just(3), st.integers(32, 40), st.just(32)),
    st.sampled_from([(), (3,), (32, 32), (3, 32, 32), (1, 3, 1, 32, 32)]),
)


@every_backbone
def test_wrong_shapes(name: str, models: dict[str, nn.Module]) -> None:
    run_cases(
        wrong_shapes,
        lambda shape: refused(
            lambda: models[name](torch.zeros(shape)), '(B, 3, H, W)', str(shape), kind=ValueError
        ),
        10,
    )


@every_backbone
def test_integers_are_no_image(name: str, models: dict[str, nn.Module]) -> None:
    dtypes = st.sampled_from([torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool])
    run_cases(
        dtypes,
        lambda dtype: refused(
            lambda: models[name](torch.ones(1, 3, 32, 32).to(dtype)),
            str(dtype),
            'normalise',
            kind=TypeError,
        ),
        5,
    )


@every_backbone
def test_nan_stays_in_its_image_and_is_seen(name: str, models: dict[str, nn.Module]) -> None:
    clean = torch.randn(2, 3, 33, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = models[name](clean)

    def check(value: tuple[float, int, int]) -> None:
        number, row, column = value
        image = clean.clone()
        image[0, :, row, column] = number
        with torch.no_grad():
            found = models[name](image)
        # A number that is not finite reaches the last map, and no other image.
        assert not found[-1][0].isfinite().all()
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[1], b[1], rtol=0, atol=1e-5)

    numbers = st.sampled_from([math.nan, math.inf, -math.inf])
    run_cases(st.tuples(numbers, st.integers(0, 32), st.integers(0, 39)), check, 4)
