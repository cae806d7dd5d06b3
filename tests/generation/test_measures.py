"""Fréchet distance and distance to the training set, where their values are known."""

import pytest
import torch

pytest.importorskip('mmengine')

from mmvttt.openmmlab.models.digit_quality import frechet_distance, nearest_distance


def test_frechet_distance_of_gaussians() -> None:
    torch.manual_seed(0)
    scales = torch.tensor([[[2.0, 0.0], [1.5, 1.0]], [[1.0, 2.0], [0.0, 3.0]]])
    one, other = (torch.randn(2, 200, 2) @ scales + torch.tensor([[[0.0]], [[3.0]]])).double()
    a, b = torch.cov(one.T), torch.cov(other.T)
    # tr √(AB) = √(tr AB + 2√det AB) in two dimensions.
    cross = ((a @ b).trace() + 2 * (a.det() * b.det()).sqrt()).sqrt()
    means = (one.mean(0) - other.mean(0)).square().sum()
    expected = (means + a.trace() + b.trace() - 2 * cross).item()
    assert frechet_distance(one, other) == pytest.approx(expected, abs=1e-9)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)


def test_nearest() -> None:
    training = torch.tensor([[[0.0, 0.0]], [[10.0, 0.0]]])
    images = torch.tensor([[[3.0, 4.0]], [[10.0, 1.0]], [[9.0, 0.0]]])
    assert nearest_distance(images, training) == 1
    assert nearest_distance(training, training) == 0
