"""Whether generated digits are digits: a small classifier's opinion, and distances to real ones."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from torch import Tensor, nn

from ..datasets.digit_images import TinyDigits
from ..registry import METRICS

_EPOCHS = 25


def train_classifier(digits: TinyDigits) -> nn.Sequential:
    """Trains a classifier of the digits, always the same one, in seconds on a CPU.

    Its last layer makes the logits of the ten digits from 64 features.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU()),
            nn.Linear(64, 10),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        steps = _EPOCHS * (len(digits) // 64)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(_EPOCHS):
            for batch in torch.randperm(len(digits)).split(64)[: len(digits) // 64]:
                optimizer.zero_grad()
                F.cross_entropy(model(digits.images[batch]), digits.labels[batch]).backward()
                optimizer.step()
                schedule.step()
    return model.eval()


def frechet_distance(features: Tensor, reference: Tensor) -> float:
    """Squared Fréchet distance of two Gaussians fitted to features (Heusel et al. 2017, Eq. 6).

    ‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2·(Σ₁Σ₂)^½), in fp64, of `(N, F)` and `(M, F)`.
    """
    features, reference = features.double(), reference.double()
    cov1, cov2 = torch.cov(features.T), torch.cov(reference.T)
    # Σ₁Σ₂ has the eigenvalues of the symmetric Σ₁^½ Σ₂ Σ₁^½.
    values, vectors = torch.linalg.eigh(cov1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov2 @ root).clamp(min=0).sqrt().sum()
    mean = (features.mean(0) - reference.mean(0)).square().sum()
    return (mean + cov1.trace() + cov2.trace() - 2 * cross).item()


def nearest_distance(images: Tensor, training: Tensor) -> float:
    """Median distance of images `(N, …)` to the nearest of the training images `(M, …)`.

    Near 0 the model copies. Compare it with held-out real images.
    """
    images, training = images.flatten(1).double(), training.flatten(1).double()
    return torch.cdist(images, training).amin(1).median().item()


@METRICS.register_module()
class DigitQuality(BaseMetric):
    """Accuracy, Fréchet distance and distance to the training set of generated digits.

    - `accuracy`: how many samples the classifier takes for the digit that was asked for.
    - `frechet`: of its features, to the training set's.
    - `nearest`: median distance to the nearest training image, near 0 for a copy machine.

    The same three of the held-out digits, `real_…`, say what can be reached.
    """

    default_prefix = 'digits'

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keeps the images and their classes."""
        self.results += [(s['image'].cpu(), int(s['label'])) for s in data_samples]

    def compute_metrics(self, results: list) -> dict[str, float]:
        """The measures of all images."""
        training, real = TinyDigits(), TinyDigits('test')
        classifier = train_classifier(training)
        images = torch.stack([image for image, _ in results])
        labels = torch.tensor([label for _, label in results])
        sets = {'': (images, labels), 'real_': (real.images, real.labels)}
        measures = {}
        with torch.no_grad():
            reference = classifier[:-1](training.images)
            for name, (pictures, classes) in sets.items():
                features = classifier[:-1](pictures)
                hits = classifier[-1](features).argmax(1) == classes
                measures[f'{name}accuracy'] = hits.double().mean().item()
                measures[f'{name}frechet'] = frechet_distance(features, reference)
                measures[f'{name}nearest'] = nearest_distance(pictures, training.images)
        return measures
