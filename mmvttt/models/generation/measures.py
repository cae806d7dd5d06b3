"""Measures of samples by a network: Fréchet distance, Inception score, precision and recall."""

import torch
from torch import Tensor

from mmvttt.arguments import check_int
from mmvttt.errors import UsageError

_NEIGHBOURS = 3


def frechet_distance(features: Tensor, reference: Tensor) -> float:
    """Squared Fréchet distance of two Gaussians fitted to features (Heusel et al. 2017, Eq. 6).

    ‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2·(Σ₁Σ₂)^½), in fp64. It is the FID if the features are from the
    papers' Inception network; the bias depends on the sizes of the sets.

    Args:
        features: `(N, F)` of the samples.
        reference: `(M, F)` of real images.

    Raises:
        UsageError: A set has fewer than two rows, another width, or numbers that are not finite.
    """
    _require_sets(features, reference)
    (mean1, cov1), (mean2, cov2) = (_gaussian(f) for f in (features, reference))
    # Σ₁Σ₂ has the eigenvalues of the symmetric Σ₁^½ Σ₂ Σ₁^½.
    values, vectors = torch.linalg.eigh(cov1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov2 @ root).clamp(min=0).sqrt().sum()
    distance = (mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * cross
    return distance.item()


def inception_score(probabilities: Tensor, split_size: int | None = None) -> float:
    """exp of the mean of KL(p(y | x) ‖ p(y)) over images (Salimans et al. 2016, Sec. 4), in fp64.

    It is the papers' IS if the probabilities are from their Inception network.

    Args:
        probabilities: `(N, K)` of K classes, from any classifier.
        split_size: The score is the mean over splits of so many images, the last one shorter, as in
            ADM's evaluator with 5000; None for one split.

    Raises:
        UsageError: The rows are not probabilities.
    """
    if probabilities.dim() != 2 or 0 in probabilities.shape:
        raise UsageError(
            f'probabilities of the shape {tuple(probabilities.shape)}: a classifier gives (N, K)'
        )
    p = probabilities.double()
    # Tolerance for a softmax in half precision.
    if not (p >= 0).all() or not ((p.sum(1) - 1).abs() < 1e-2).all():
        raise UsageError(
            'the rows are not probabilities of classes, 0 or more with the sum 1: end the '
            'classifier with a softmax'
        )
    if split_size is not None:
        check_int('split_size', split_size)
    p = p / p.sum(1, keepdim=True)
    scores = []
    for part in p.split(split_size or len(p)):
        divergence = torch.xlogy(part, part) - torch.xlogy(part, part.mean(0))
        scores.append(divergence.sum(1).mean().exp())
    return torch.stack(scores).mean().item()


def precision_recall(features: Tensor, reference: Tensor) -> tuple[float, float]:
    """Improved precision and recall (Kynkäänniemi et al. 2019, Eq. 1 and 2).

    Precision: the share of samples inside a ball around some real image, with its third nearest
    real neighbour on the surface. Recall: the same with samples and real images exchanged.

    Args:
        features: `(N, F)` of the samples.
        reference: `(M, F)` of real images.

    Raises:
        UsageError: See `frechet_distance`; or a set has three rows or fewer.
    """
    _require_sets(features, reference)
    if min(len(features), len(reference)) <= _NEIGHBOURS:
        raise UsageError(
            f'precision and recall need more than {_NEIGHBOURS} images in both sets, got '
            f'{len(features)} and {len(reference)}'
        )
    fake, real = features.double(), reference.double()
    return _share_inside(fake, real), _share_inside(real, fake)


def nearest_distance(images: Tensor, training: Tensor) -> float:
    """Median distance of images `(N, …)` to the nearest of the training images `(M, …)`.

    Near 0 the model copies; compare it with held-out real images.
    """
    images, training = images.flatten(1).double(), training.flatten(1).double()
    return torch.cat([torch.cdist(x, training).amin(1) for x in images.split(1024)]).median().item()


def _gaussian(features: Tensor) -> tuple[Tensor, Tensor]:
    features = features.double()
    return features.mean(0), torch.cov(features.T).reshape(features.shape[1], -1)


def _share_inside(points: Tensor, centres: Tensor) -> float:
    """The share of points inside a ball around a centre, up to its third neighbour."""
    # A centre is its own nearest one.
    distances = (torch.cdist(part, centres) for part in centres.split(1024))
    radii = torch.cat([d.kthvalue(_NEIGHBOURS + 1, dim=1).values for d in distances])
    inside = [(torch.cdist(part, centres) <= radii).any(1) for part in points.split(1024)]
    return torch.cat(inside).double().mean().item()


def _require_sets(features: Tensor, reference: Tensor) -> None:
    for what, rows in (('samples', features), ('reference', reference)):
        if rows.dim() != 2 or len(rows) < 2:
            raise UsageError(
                f'the features of the {what} have the shape {tuple(rows.shape)}: two rows or more '
                'of features are needed, (N, F)'
            )
        if not rows.isfinite().all():
            raise UsageError(f'the features of the {what} are not finite')
    if features.shape[1] != reference.shape[1]:
        raise UsageError(
            f'samples have {features.shape[1]} features and the reference has '
            f'{reference.shape[1]}: both must come from the same extractor'
        )
