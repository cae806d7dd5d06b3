"""Latents of an autoencoder, computed once and read from a folder of memory-mapped arrays.

The folder holds `latents.json`; `moments.npy`, `(N, 2, 2C, h, w)`: mean and standard deviation of
each image's latents and of its mirror image's; and what a model is told about each image, an array
of N rows for each name: `class_labels.npy`, or `encoder_hidden_states.npy` and
`pooled_projections.npy`. NumPy's plain arrays hold numbers alone: nothing in them can run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.errors import DataError, MissingDataError, UsageError

from ..registry import DATASETS

_NOTES, _MOMENTS = 'latents.json', 'moments.npy'
# Images between two notes of how far the cache is.
_INTERVAL = 4096


@DATASETS.register_module()
class CachedLatents(Dataset):
    """Latents that `cache_latents` has written: a sample of each image's Gaussian, as DiT trains.

    Args:
        data_root: The folder.
        flip: Whether every other image is mirrored, at random.
        conditions: Names of the arrays that say what an image is; None for all that are there.

    Raises:
        MissingDataError: There is no such cache.
        DataError: The cache is not whole, or an array has not a row for each image.
    """

    def __init__(
        self,
        data_root: str | os.PathLike[str],
        flip: bool = True,
        conditions: Sequence[str] | None = None,
    ) -> None:
        self.root = Path(data_root)
        self.flip = flip
        self.conditions = conditions
        if not (self.root / _NOTES).is_file():
            raise MissingDataError(
                f'{os.fspath(data_root)!r} holds no cache of latents ({_NOTES} is missing): make '
                'one by tools/cache_latents.py'
            )
        self.notes = json.loads((self.root / _NOTES).read_text())
        if self.notes['done'] != self.notes['images']:
            raise DataError(
                f'the cache {os.fspath(data_root)!r} has {self.notes["done"]} of '
                f'{self.notes["images"]} images: run tools/cache_latents.py again, it goes on'
            )
        self.metainfo = dict(classes=self.notes.get('classes', []))
        self._arrays: dict[str, np.ndarray] = {}
        missing = [name for name in conditions or () if name not in self.arrays]
        if missing:
            raise MissingDataError(
                f'the cache {os.fspath(data_root)!r} has no {missing[0]}.npy: put an array with a '
                'row for each image there'
            )
        for name, array in self.arrays.items():
            if len(array) != self.notes['images']:
                raise DataError(
                    f'{name}.npy in {os.fspath(data_root)!r} has {len(array)} rows for '
                    f'{self.notes["images"]} images: every array needs one for each'
                )

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, opened in each process by itself."""
        if not self._arrays:
            files = sorted(self.root.glob('*.npy'))
            if self.conditions is not None:
                files = [f for f in files if f.stem in ('moments', *self.conditions)]
            self._arrays = {f.stem: np.load(f, mmap_mode='r', allow_pickle=False) for f in files}
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        # A map would be pickled with all that is in the file.
        return {**vars(self), '_arrays': {}}

    def __len__(self) -> int:
        return self.notes['images']

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`latents`, `(C, h, w)`, scaled for the diffusion model, and the image's conditions.

        Raises:
            DataError: A number is not finite.
        """
        rows = {name: np.array(array[index]) for name, array in self.arrays.items()}
        mirrored = int(self.flip and torch.rand(()) < 0.5)
        moments = torch.from_numpy(rows.pop('moments')[mirrored]).float()
        mean, deviation = moments.chunk(2)
        latents = mean + deviation * torch.randn(mean.shape)
        latents = (latents - self.notes['shift']) * self.notes['scale']
        item = dict(latents=latents, **{k: torch.as_tensor(row) for k, row in rows.items()})
        for name, value in item.items():
            if not value.isfinite().all():
                file = _MOMENTS if name == 'latents' else f'{name}.npy'
                raise DataError(
                    f'image {index} of the cache {str(self.root)!r} is not finite in {file}: cache '
                    'the latents again, in fp32 if the autoencoder overflows'
                )
        return item


@DATASETS.register_module()
class TinyDigits(Dataset):
    """scikit-learn's 1797 handwritten digits, 8×8 and one channel in [−1, 1], as a set of latents.

    Args:
        split: 'train' (1437 images), or 'test' (the other 360).

    Raises:
        UsageError: scikit-learn is missing.
    """

    def __init__(self, split: str = 'train') -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UsageError("the digits need scikit-learn: pip install 'mmvttt[demo]'") from error
        found = load_digits()
        order = np.random.default_rng(0).permutation(len(found.target))
        chosen = order[:1437] if split == 'train' else order[1437:]
        self.metainfo = dict(classes=[str(digit) for digit in range(10)])
        images = torch.from_numpy(found.images[chosen]).float()
        self.images = images[:, None] / 8 - 1
        self.labels = torch.from_numpy(found.target[chosen]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`latents`, `(1, 8, 8)`, and `class_labels`."""
        return dict(latents=self.images[index], class_labels=self.labels[index])


class ClassFolders(Dataset):
    """Images in a folder for each class, cut to a square: what `cache_latents` reads.

    Args:
        root: The folder of folders; classes are numbered in the order of their names.
        size: Side of the square in pixels: the shorter side is resized to it, the middle is kept.

    Raises:
        MissingDataError: There is no such folder, or no image in it.
    """

    def __init__(self, root: str | os.PathLike[str], size: int) -> None:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        transform = v2.Compose(
            [
                v2.ToImage(),
                v2.Resize(size, v2.InterpolationMode.BICUBIC, antialias=True),
                v2.CenterCrop(size),
                v2.ToDtype(torch.float32, scale=True),
            ]
        )
        try:
            self.folder = ImageFolder(os.fspath(root), transform)
        except FileNotFoundError as error:
            raise MissingDataError(
                f'{os.fspath(root)!r} holds no images in a folder for each class: {error}'
            ) from error

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """An image `(3, size, size)` in [−1, 1], and its class."""
        image, label = self.folder[index]
        return image * 2 - 1, label

    @property
    def classes(self) -> list[str]:
        """The names of the folders, in order."""
        return self.folder.classes


def cache_latents(
    autoencoder: Any,
    images: ClassFolders,
    out: str | os.PathLike[str],
    batch_size: int = 32,
    num_workers: int = 0,
    dtype: str = 'float16',
) -> Path:
    """Writes the latents of images, and of their mirror images; goes on where it was stopped.

    A bar on stderr shows the progress.

    Args:
        autoencoder: A diffusers `AutoencoderKL`, on the device to use.
        images: The images, or a data set of items `((3, H, W) in [−1, 1], class)`.
        out: The folder.
        batch_size: Images at a time.
        num_workers: Processes that read images.
        dtype: 'float16', or 'float32' for twice the space.

    Returns:
        The folder.

    Raises:
        UsageError: The folder has a cache that was made with other settings.
        DataError: A latent is not finite, or too large for the type.
    """
    out = Path(out)
    count, config = len(images), autoencoder.config
    with torch.inference_mode():
        first = _moments(autoencoder, images[0][0][None])
    shape = (count, *first.shape[1:])
    notes = dict(
        images=count,
        shape=list(shape),
        dtype=dtype,
        scale=config.scaling_factor,
        shift=config.get('shift_factor') or 0.0,
        classes=images.classes,
    )
    done = _start_or_resume(out, notes)
    mode: Any = 'r+' if done else 'w+'
    moments = np.lib.format.open_memmap(out / _MOMENTS, mode, dtype, None if done else shape)
    labels = np.lib.format.open_memmap(
        out / 'class_labels.npy', mode, np.int64, None if done else (count,)
    )
    starts = range(done, count, batch_size)
    batches = [list(range(start, min(start + batch_size, count))) for start in starts]
    loader = DataLoader(images, batch_sampler=batches, num_workers=num_workers)
    noted = done
    loaded: Any = track(loader, 'caching', console=Console(stderr=True))
    for indices, (pixels, classes) in zip(batches, loaded, strict=True):
        with torch.inference_mode():
            found = _moments(autoencoder, pixels).cpu().numpy()
        with np.errstate(over='ignore'):
            found = found.astype(dtype)
        if not np.isfinite(found).all():
            raise DataError(
                f'the latents of images {indices[0]} to {indices[-1]} are not finite in {dtype}: '
                "give dtype 'float32', and the autoencoder in fp32"
            )
        part = slice(indices[0], indices[-1] + 1)
        moments[part], labels[part] = found, classes.numpy()
        done = indices[-1] + 1
        if done - noted >= _INTERVAL or done == count:
            moments.flush()
            labels.flush()
            _note(out, {**notes, 'done': done})
            noted = done
    return out


def _moments(autoencoder: Any, pixels: Tensor) -> Tensor:
    """Mean and standard deviation `(B, 2, 2C, h, w)` of images and of their mirror images."""
    both = torch.stack([pixels, pixels.flip(-1)], dim=1).flatten(0, 1)
    parameter = next(autoencoder.parameters())
    found = autoencoder.encode(both.to(parameter)).latent_dist
    return torch.cat([found.mean, found.std], dim=1).float().unflatten(0, (-1, 2))


def _start_or_resume(out: Path, notes: dict[str, Any]) -> int:
    """Prepares the folder, and returns how many images of this cache it already has."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / _NOTES).is_file():
        _note(out, {**notes, 'done': 0})
        return 0
    before = json.loads((out / _NOTES).read_text())
    done = before.pop('done')
    changed = [key for key in notes if before.get(key) != notes[key]]
    if changed:
        raise UsageError(
            f'{str(out)!r} has a cache that was made with other settings ({changed[0]}: '
            f'{before.get(changed[0])}, now {notes[changed[0]]}): choose another folder'
        )
    return done


def _note(out: Path, notes: dict[str, Any]) -> None:
    write_whole(out / _NOTES, json.dumps(notes, indent=1).encode())
