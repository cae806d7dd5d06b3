"""Measures of generated images: Fréchet distance, precision, recall, Inception score."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.datasets.folder import IMG_EXTENSIONS

from mmvttt.errors import MissingDataError, UsageError
from mmvttt.models.generation.measures import frechet_distance, inception_score, precision_recall

# Features of 64×64 pixels: a Fréchet distance needs the covariances of all pairs.
_MOST_FEATURES = 64 * 64 * 3
# Images of a forward pass.
_BATCH = 64


def load_network(path: str | os.PathLike[str], option: str = '--features') -> nn.Module:
    """Loads a network of images `(B, 3, H, W)` in [0, 1], with a dynamic B, of `torch.export.save`.

    Raises:
        MissingDataError: There is no such file.
        UsageError: It is another kind of file.
    """
    if not Path(path).is_file():
        raise MissingDataError(f'{option} {os.fspath(path)!r} is not a file: give a .pt2 file')
    try:
        return torch.export.load(path).module()
    except Exception as error:
        # The error depends on the kind of the file.
        raise UsageError(
            f'{option} {os.fspath(path)!r} cannot be read ({type(error).__name__}): give what '
            'torch.export.save has written'
        ) from error


def require_reference(
    reference: str | os.PathLike[str], pixels: tuple[int, int] | None = None
) -> None:
    """Checks the reference of `measure` before images are drawn.

    Args:
        reference: See `measure`.
        pixels: (height, width) of the images, if their pixels are the features.

    Raises:
        MissingDataError: There is no such reference.
        UsageError: The images have too many pixels.
    """
    path = Path(reference)
    if not path.is_dir() and not (path.suffix in ('.npz', '.npy') and path.is_file()):
        raise MissingDataError(
            f'there is no reference {str(path)!r}: give an .npz of images, a folder of images, or '
            'an .npy of features'
        )
    if pixels and 3 * pixels[0] * pixels[1] > _MOST_FEATURES:
        raise UsageError(
            f'--reference: images of {pixels[0]}×{pixels[1]} have too many pixels for features '
            f'(at most {_MOST_FEATURES} numbers): give --features, a network'
        )


def score(images: np.ndarray, classifier: nn.Module) -> float:
    """Inception score of images `(N, H, W, 3)` uint8, in splits of 5000 as in ADM's evaluator.

    The classifier maps images `(B, 3, H, W)` in [0, 1] to probabilities `(B, K)`.

    Raises:
        UsageError: The classifier's rows are not probabilities.
    """
    return inception_score(_features(images, classifier), split_size=5000)


def measure(
    images: np.ndarray, reference: str | os.PathLike[str], extractor: nn.Module | None = None
) -> dict[str, float]:
    """Fréchet distance, precision and recall of images against a reference.

    Args:
        images: `(N, H, W, 3)` uint8.
        reference: An `.npz` of images as ADM's (`arr_0`), a folder of image files of one size, or
            an `.npy` of features of the same extractor.
        extractor: Images `(B, 3, H, W)` in [0, 1] → features `(B, F)`; None takes the pixels.

    Raises:
        MissingDataError: There is no such reference.
        UsageError: The features of the two do not fit together.
    """
    path = Path(reference)
    require_reference(path)
    if path.suffix == '.npy':
        real = torch.from_numpy(np.load(path, allow_pickle=False)).flatten(1)
    else:
        real = _features(_read_reference(path), extractor)
    features = _features(images, extractor)
    precision, recall = precision_recall(features, real)
    return dict(frechet=frechet_distance(features, real), precision=precision, recall=recall)


def _read_reference(path: Path) -> np.ndarray:
    if path.is_dir():
        files = sorted(f for f in path.rglob('*') if f.suffix.lower() in IMG_EXTENSIONS)
        pictures = [np.asarray(Image.open(f).convert('RGB')) for f in files]
        if len({p.shape for p in pictures}) != 1:
            problem = 'have several sizes: make them one size' if pictures else 'are missing'
            raise UsageError(f'the images in {str(path)!r} {problem}')
        return np.stack(pictures)
    with np.load(path, allow_pickle=False) as arrays:
        # Others hold statistics of another extractor's features.
        name = 'arr_0' if 'arr_0' in arrays.files else arrays.files[0]
        images = arrays[name]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise UsageError(
            f'{name} in {str(path)!r} has {images.shape} of {images.dtype}: give images, '
            '(N, H, W, 3) of uint8'
        )
    return images


@torch.inference_mode()
def _features(images: np.ndarray, network: nn.Module | None) -> Tensor:
    """Rows `(N, F)` of a network, or of pixels."""
    parameter = None if network is None else next(network.parameters(), None)
    rows = []
    for part in torch.from_numpy(images).split(_BATCH):
        batch = part.permute(0, 3, 1, 2).float() / 255
        if network is not None:
            batch = network(batch if parameter is None else batch.to(parameter))
        rows.append(batch.flatten(1).cpu())
    return torch.cat(rows)
