"""Quality of frozen features: nearest neighbours, linear probes, agreement with a source."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from mmvttt.errors import DataError
from mmvttt.models.distillation import block_tokens
from mmvttt.pictures import open_image

# Label of pixels and patches without a class.
IGNORED = 255


@torch.no_grad()
def features_of(
    model: nn.Module, batches: Iterable[Tensor], patches: bool = False
) -> dict[str, np.ndarray]:
    """Normed features of images `(B, 3, H, W)` by a frozen plain backbone or timm's ViT.

    Returns:
        `mean` of the patches, and `class`, the class token where there is one, `(N, C)`; or all
        `patches`, `(N·h·w, C)`.
    """
    prefix = getattr(model, 'num_prefix_tokens', 0)
    features: dict[str, list[Tensor]] = defaultdict(list)
    for images in batches:
        tokens = block_tokens(model, images)[-1]
        if patches:
            features['patches'].append(tokens[:, prefix:].flatten(0, 1))
            continue
        features['mean'].append(tokens[:, prefix:].mean(1))
        if getattr(model, 'cls_token', None) is not None:
            features['class'].append(tokens[:, 0])
    return {k: torch.cat(v).float().cpu().numpy() for k, v in features.items()}


@torch.no_grad()
def token_cosines(model: nn.Module, source: nn.Module, batches: Iterable[Tensor]) -> list[float]:
    """Mean cosine of patch tokens to those of a source, by block, the final norm last."""
    prefix, rows = getattr(model, 'num_prefix_tokens', 0), []
    for images in batches:
        pairs = zip(block_tokens(model, images), block_tokens(source, images), strict=True)
        near = [F.cosine_similarity(a, b, dim=-1)[:, prefix:].mean(1) for a, b in pairs]
        rows.append(torch.stack(near, dim=1).double())
    return torch.cat(rows).mean(0).tolist()


def probe(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, k: int = 20
) -> dict[str, float]:
    """Accuracies of `k` nearest neighbours by cosine, and of a logistic regression.

    Args:
        train, test: Features `(N, C)` and `(M, C)`.
        labels, truth: Their classes.
        k: Number of neighbours, weighted alike.
    """
    from sklearn.neighbors import KNeighborsClassifier

    nearest = KNeighborsClassifier(min(k, len(train)), metric='cosine').fit(train, labels)
    linear = _linear_probe(train, labels)
    return {n: float(m.score(test, truth)) for n, m in (('knn', nearest), ('linear', linear))}


def _linear_probe(features: np.ndarray, labels: np.ndarray) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500))
    return model.fit(features, labels)


def patch_labels(path: Path, size: tuple[int, int], side: int) -> np.ndarray:
    """The most frequent class of each patch `(h·w,)` of a label map, resized to a size."""
    pixels = np.array(open_image(path)[0].resize(size[::-1], Image.Resampling.NEAREST))
    if pixels.ndim != 2:
        raise DataError(f'{str(path)!r} is no label map: give one channel, the number of a class.')
    patches = pixels.reshape(size[0] // side, side, -1, side).swapaxes(1, 2).reshape(-1, side**2)
    labelled = (patch[patch != IGNORED] for patch in patches)
    return np.array([np.bincount(p).argmax() if len(p) else IGNORED for p in labelled])


def patch_miou(train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray) -> float:
    """Mean intersection over union of a linear probe of patches, without those `IGNORED`."""
    from sklearn.metrics import jaccard_score

    model = _linear_probe(train[labels != IGNORED], labels[labels != IGNORED])
    seen = truth != IGNORED
    return float(jaccard_score(truth[seen], model.predict(test[seen]), average='macro'))


def neighbour_agreement(a: np.ndarray, b: np.ndarray, k: int = 10) -> float:
    """Share of an image's k nearest neighbours by features `a` that are among those by `b`."""
    from sklearn.neighbors import NearestNeighbors

    k = min(k, len(a) - 1)
    # Called without X, so that an image is not its own neighbour.
    rows = [NearestNeighbors(n_neighbors=k, metric='cosine').fit(x).kneighbors()[1] for x in (a, b)]
    shared = [len(set(x) & set(y)) for x, y in zip(*map(np.ndarray.tolist, rows), strict=True)]
    return float(np.mean(shared) / k)
