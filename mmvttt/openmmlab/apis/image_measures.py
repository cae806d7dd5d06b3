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
from mmvttt.models.generation.measures import (
    as_features,
    frechet_distance,
    inception_score,
    precision_recall,
)

# Pixels that a Fréchet distance can be of: 64×64 in three colours.
_MOST_FEATURES = 64 * 64 * 3


def load_network(path: str | os.PathLike[str], option: str = '--features') -> nn.Module:
    """Loads a network saved by `torch.export.save`, in which the number of images B is dynamic.

    Args:
        path: The file. The network takes images `(B, 3, H, W)` in [0, 1].
        option: What names the file, for errors.

    Raises:
        MissingDataError: There is no such file.
        UsageError: It is another kind of file.
    """
    if not Path(path).is_file():
        raise MissingDataError(f'{option} {os.fspath(path)!r} is no file: give a .pt2 file')
    try:
        return torch.export.load(path).module()
    except Exception as error:
        # The error depends on the kind of the file.
        raise UsageError(
            f'{option} {os.fspath(path)!r} cannot be read ({type(error).__name__}): give what '
            'torch.export.save has written'
        ) from error


def require_reference(reference: str | os.PathLike[str]) -> None:
    """Raises a MissingDataError where there is no reference of this name."""
    path = Path(reference)
    if not path.is_dir() and not (path.suffix in ('.npz', '.npy') and path.is_file()):
        raise _no_reference(path)


def require_pixels_as_features(size: tuple[int, int]) -> None:
    """Raises a UsageError where images of (height, width) are too large for features of their own.

    A Fréchet distance needs the covariance of all pairs of features.
    """
    if 3 * size[0] * size[1] > _MOST_FEATURES:
        raise UsageError(
            f'--reference: images of {size[0]}×{size[1]} have too many pixels for features '
            f'(at most {_MOST_FEATURES} numbers): give --features, a network'
        )


def _no_reference(path: Path) -> MissingDataError:
    return MissingDataError(
        f'there is no reference {str(path)!r}: give an .npz of images, a folder of images, or an '
        '.npy of features'
    )


def score(images: np.ndarray, classifier: nn.Module, batch_size: int = 64) -> float:
    """Inception score of images `(N, H, W, 3)` uint8, in splits of 5000 as in ADM's evaluator.

    Args:
        images: The images.
        classifier: Images `(B, 3, H, W)` in [0, 1] → probabilities `(B, K)`.
        batch_size: Images at a time.

    Raises:
        UsageError: The rows of the classifier are not probabilities.
    """
    return inception_score(_features(images, classifier, batch_size), split_size=5000)


def measure(
    images: np.ndarray,
    reference: str | os.PathLike[str],
    extractor: nn.Module | None = None,
    batch_size: int = 64,
) -> dict[str, float]:
    """Fréchet distance, precision and recall of images against a reference.

    Args:
        images: `(N, H, W, 3)` uint8.
        reference: An `.npz` of images as ADM's (`arr_0`), a folder of image files of one size, or
            an `.npy` of features of the same extractor.
        extractor: Images `(B, 3, H, W)` in [0, 1] → features `(B, F)`; None takes the pixels.
        batch_size: Images at a time.

    Raises:
        MissingDataError: There is no such reference.
        UsageError: The features of the two do not fit together.
    """
    path = Path(reference)
    if path.suffix == '.npy' and path.is_file():
        real = as_features(np.load(path, allow_pickle=False))
    else:
        real = _features(_read_reference(path), extractor, batch_size)
    found = _features(images, extractor, batch_size)
    precision, recall = precision_recall(found, real)
    return dict(frechet=frechet_distance(found, real), precision=precision, recall=recall)


def _read_reference(path: Path) -> np.ndarray:
    if path.suffix == '.npz' and path.is_file():
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
    if path.is_dir():
        files = sorted(f for f in path.rglob('*') if f.suffix.lower() in IMG_EXTENSIONS)
        pictures = [np.asarray(Image.open(f).convert('RGB')) for f in files]
        if len({p.shape for p in pictures}) == 1:
            return np.stack(pictures)
        if pictures:
            raise UsageError(f'the images in {str(path)!r} have several sizes: make them one size')
    raise _no_reference(path)


@torch.inference_mode()
def _features(images: np.ndarray, extractor: nn.Module | None, batch_size: int) -> Tensor:
    found = []
    parameter = None if extractor is None else next(extractor.parameters(), None)
    for start in range(0, len(images), batch_size):
        batch = (
            torch.from_numpy(images[start : start + batch_size]).permute(0, 3, 1, 2).float() / 255
        )
        if extractor is not None:
            batch = extractor(batch if parameter is None else batch.to(parameter))
        found.append(batch.flatten(1).cpu())
    return torch.cat(found)
