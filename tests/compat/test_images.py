"""mmcv's image functions beside newer packages."""

import mmcv
import numpy as np
import pytest
from mmpretrain.datasets import ColorJitter

from mmvttt import compat


@pytest.mark.parametrize('backend', ['cv2', 'pillow'])
def test_hues_turn_both_ways(backend: str) -> None:
    image = np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8)
    # 255 steps are a turn, and 256 none: back from any hue leads to the one before.
    for factor in (0.1, 0.25, 0.5):
        back = mmcv.adjust_hue(image, -factor, backend=backend).astype(int)
        steps = 256 - int(factor * 255)
        hsv = {'cv2': _with_cv2, 'pillow': _with_pillow}[backend]
        assert np.array_equal(back, hsv(image, steps))
    same = mmcv.adjust_hue(image, 0, backend=backend).astype(int)
    assert np.abs(same - image).max() <= 6
    with pytest.raises(ValueError, match=r'hue_factor:-0.6'):
        mmcv.adjust_hue(image, -0.6)


def _with_cv2(image: np.ndarray, steps: int) -> np.ndarray:
    import cv2

    hsv = cv2.cvtColor(image, cv2.COLOR_BGR2HSV_FULL)
    hsv[..., 0] = (hsv[..., 0].astype(int) + steps) % 256
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR_FULL)


def _with_pillow(image: np.ndarray, steps: int) -> np.ndarray:
    from PIL import Image

    hsv = np.array(Image.fromarray(image[..., ::-1]).convert('HSV'))
    hsv[..., 0] = (hsv[..., 0].astype(int) + steps) % 256
    return np.array(Image.fromarray(hsv, 'HSV').convert('RGB'))[..., ::-1]


def test_the_transform_of_contrastive_learning() -> None:
    jitter = ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
    image = np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8)
    for seed in range(8):
        np.random.seed(seed)
        assert jitter.transform({'img': image})['img'].shape == image.shape


def test_taken_back() -> None:
    ours = mmcv.adjust_hue
    (done,) = (p for p in compat.patches() if p.name == 'negative-hues')
    if not done.applied:
        pytest.skip(done.unneeded)
    compat.setup(skip=['negative-hues'])
    try:
        assert mmcv.adjust_hue is mmcv.image.photometric.adjust_hue is ours.__wrapped__
        with pytest.raises(OverflowError):
            mmcv.adjust_hue(np.zeros((2, 2, 3), np.uint8), -0.1)
    finally:
        compat.setup()
