"""Fréchet distance and distance to the training set, where their values are known."""

import pytest
import torch

pytest.importorskip('mmengine')

from mmvttt.openmmlab.models.digit_quality import frechet_distance, nearest_distance


def exact(mean: list[float], root: list[list[float]]) -> torch.Tensor:
    """Points whose mean and unbiased covariance, root·rootᵀ, are exact."""
    torch.manual_seed(0)
    x = torch.randn(200, len(mean), dtype=torch.float64)
    x -= x.mean(0)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(x.T))).T
    return x @ torch.tensor(root, dtype=torch.float64).T + torch.tensor(mean)


def test_frechet_distance_of_gaussians() -> None:
    one = exact([0.0, 0.0], [[2.0, 0.0], [0.0, 3.0]])
    other = exact([1.0, -2.0], [[1.0, 0.0], [0.0, 5.0]])
    # ‖μ‖² + Σ(σ − σ′)² where the axes agree; fp64.
    assert frechet_distance(one, other) == pytest.approx(5 + 1 + 4, abs=1e-9)
    # The root of the product of two that do not commute, by its eigenvalues in closed form:
    # tr √(AB) = √(tr AB + 2√det AB) in two dimensions.
    turned = exact([0.0, 0.0], [[2.0, 0.0], [1.5, 1.0]])
    a, b = torch.cov(one.T), torch.cov(turned.T)
    cross = ((a @ b).trace() + 2 * (a.det() * b.det()).sqrt()).sqrt()
    expected = (a.trace() + b.trace() - 2 * cross).item()
    assert frechet_distance(one, turned) == pytest.approx(expected, abs=1e-9)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)


def test_nearest() -> None:
    training = torch.tensor([[[0.0, 0.0]], [[10.0, 0.0]]])
    images = torch.tensor([[[3.0, 4.0]], [[10.0, 1.0]], [[9.0, 0.0]]])
    assert nearest_distance(images, training) == 1
    assert nearest_distance(training, training) == 0
