"""Fréchet distance, precision and recall, where their values are known."""

import math

import pytest
import torch

from mmvttt.errors import UsageError
from mmvttt.models.generation.measures import (
    frechet_distance,
    inception_score,
    nearest_distance,
    precision_recall,
)


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


def test_frechet_distance_of_fewer_rows_than_features() -> None:
    """Singular covariances have no Cholesky factor; the distance is what it is."""
    torch.manual_seed(0)
    few, many = torch.randn(5, 20), torch.randn(50, 20)
    assert frechet_distance(few, few.flip(0)) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(few, many) == pytest.approx(frechet_distance(many, few), abs=1e-6)


def test_precision_and_recall_by_the_definition() -> None:
    torch.manual_seed(0)
    fake, real = torch.randn(37, 3), torch.randn(41, 3) + 0.7

    def share(points: torch.Tensor, centres: torch.Tensor) -> float:
        inside = 0
        for point in points:
            for i, centre in enumerate(centres):
                others = [(centre - c).norm() for j, c in enumerate(centres) if j != i]
                if (point - centre).norm() <= sorted(others)[2]:
                    inside += 1
                    break
        return inside / len(points)

    precision, recall = share(fake, real), share(real, fake)
    assert precision_recall(fake, real) == pytest.approx((precision, recall))
    assert 0 < precision < 1
    assert precision != recall
    assert precision_recall(real + 100, real) == (0, 0)


def test_nearest() -> None:
    training = torch.tensor([[[0.0, 0.0]], [[10.0, 0.0]]])
    images = torch.tensor([[[3.0, 4.0]], [[10.0, 1.0]], [[9.0, 0.0]]])
    assert nearest_distance(images, training) == 1
    assert nearest_distance(training, training) == 0


@pytest.mark.parametrize(
    ('features', 'words'),
    [
        (torch.zeros(1, 3), r'samples have the shape \(1, 3\)'),
        (torch.zeros(5, 4), 'samples have 4 features and the reference has 3'),
        (torch.full((5, 3), float('nan')), 'samples are not finite'),
    ],
)
def test_bad_features(features: torch.Tensor, words: str) -> None:
    for measure in (frechet_distance, precision_recall):
        with pytest.raises(UsageError, match=words):
            measure(features, torch.randn(6, 3))
    with pytest.raises(UsageError, match='need more than 3 images'):
        precision_recall(torch.randn(3, 2), torch.randn(6, 2))


def test_inception_score() -> None:
    # Sure answers in equal parts: K; the same answer for all: 1.
    assert inception_score(torch.eye(5).repeat(3, 1)) == pytest.approx(5)
    assert inception_score(torch.tensor([[0.2, 0.8]] * 4)) == pytest.approx(1)
    torch.manual_seed(0)
    p = torch.randn(23, 7, dtype=torch.float64).softmax(1)
    scores = []
    for part in (p[:10], p[10:20], p[20:]):
        mean = part.mean(0)
        kl = [sum(q * math.log(q / m) for q, m in zip(row, mean, strict=True)) for row in part]
        scores.append(math.exp(sum(kl) / len(kl)))
    assert inception_score(p, 10) == pytest.approx(sum(scores) / 3)
    assert inception_score(p.half()) == pytest.approx(inception_score(p), rel=1e-3)
    for bad in (torch.ones(3), torch.randn(3, 4), torch.full((2, 3), torch.nan), torch.zeros(0, 3)):
        with pytest.raises(UsageError, match='probabilities'):
            inception_score(bad)
