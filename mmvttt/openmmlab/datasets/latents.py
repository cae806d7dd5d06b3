"""Latents of an autoencoder, computed once and read from a folder of plain arrays.

The folder holds `latents.json`; `moments.npy`, `(N, 2, 2C, h, w)`: mean and standard deviation of
each image's latents and of its mirror image's; and the conditions of each image, an array of N rows
for each name: `class_labels.npy`, or `encoder_hidden_states.npy` and `pooled_projections.npy`.
NumPy's plain arrays have only numbers, no code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from mmvttt.arguments import check_choice
from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.errors import DataError, MissingDataError, UsageError

from ..registry import DATASETS
from ..reliability.data.contents import files_digest

_NOTES, _MOMENTS, _LABELS = 'latents.json', 'moments.npy', 'class_labels.npy'
# Images between two records of the progress.
_INTERVAL = 4096


@DATASETS.register_module()
class CachedLatents(Dataset):
    """Latents written by `cache_latents`: a sample of each image's Gaussian, as in DiT's training.

    Args:
        data_root: The folder.
        flip: Whether to mirror half the images, at random.
        conditions: Names of the arrays of conditions; None for all.

    Raises:
        MissingDataError: There is no such cache.
        DataError: The cache is incomplete, or an array lacks a row for each image.
    """

    def __init__(
        self,
        data_root: str | os.PathLike[str],
        flip: bool = True,
        conditions: Sequence[str] | None = None,
    ) -> None:
        self.root, self.flip, self.conditions = Path(data_root), flip, conditions
        where = f'the cache {os.fspath(data_root)!r}'
        self.notes = _read_notes(self.root)
        count, done = self.notes['images'], self.notes['done']
        if done != count:
            raise DataError(
                f'{where} has {done} of {count} images: continue it by tools/cache_latents.py'
            )
        self.metainfo = dict(classes=self.notes.get('classes', []))
        self._arrays: dict[str, np.memmap] = {}
        for name in ('moments', *(conditions or ())):
            if name not in self.arrays:
                raise MissingDataError(
                    f'{where} has no {name}.npy: put an array with a row for each image there'
                )
        for name, array in self.arrays.items():
            if needed := _misfit(name, array, count):
                raise DataError(
                    f'{name}.npy in {os.fspath(data_root)!r} has {array.shape} of {array.dtype}; '
                    f'needed: {needed}'
                )

    @property
    def arrays(self) -> dict[str, np.memmap]:
        """Memory maps of the arrays by name, opened separately in each process."""
        if not self._arrays:
            files = sorted(self.root.glob('*.npy'))
            if self.conditions is not None:
                files = [f for f in files if f.stem in ('moments', *self.conditions)]
            self._arrays = {f.stem: _open_array(f) for f in files}
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens the files itself.
        return {**vars(self), '_arrays': {}}

    def __len__(self) -> int:
        return self.notes['images']

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`latents`, `(C, h, w)`, scaled for the diffusion model, and the image's conditions.

        Raises:
            DataError: A number is not finite, or a file was shortened.
        """
        for array in self.arrays.values():
            _require_whole(array)
        # Copies in the machine's own byte order.
        rows = {n: a[index].astype(a.dtype.newbyteorder('=')) for n, a in self.arrays.items()}
        mirrored = int(self.flip and torch.rand(()) < 0.5)
        moments = torch.from_numpy(rows.pop('moments')[mirrored]).float()
        mean, deviation = moments.chunk(2)
        latents = mean + deviation * torch.randn(mean.shape)
        latents = (latents - self.notes['shift']) * self.notes['scale']
        conditions = {name: torch.as_tensor(row) for name, row in rows.items()}
        # Embeddings are often stored in half precision.
        item = {n: v.float() if v.is_floating_point() else v.long() for n, v in conditions.items()}
        item['latents'] = latents
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
        ValueError: There is no such split.
    """

    def __init__(self, split: str = 'train') -> None:
        check_choice('split', split, ('train', 'test'))
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UsageError("the digits need scikit-learn: pip install 'mmvttt[demo]'") from error
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        chosen = order[:1437] if split == 'train' else order[1437:]
        self.metainfo = dict(classes=[str(digit) for digit in range(10)])
        images = torch.from_numpy(digits.images[chosen]).float()
        self.images = images[:, None] / 8 - 1
        self.labels = torch.from_numpy(digits.target[chosen]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`latents`, `(1, 8, 8)`, and `class_labels`."""
        return dict(latents=self.images[index], class_labels=self.labels[index])


class ClassFolders(ImageFolder):
    """Images in a folder for each class, in [−1, 1], for `cache_latents`.

    Args:
        root: The folder of folders; classes are numbered in the order of their names.
        size: The shorter side is resized to it, and the central square is cropped.

    Raises:
        MissingDataError: There is no such folder, or no image in it.
    """

    def __init__(self, root: str | os.PathLike[str], size: int) -> None:
        steps = [
            v2.ToImage(),
            v2.Resize(size, v2.InterpolationMode.BICUBIC, antialias=True),
            v2.CenterCrop(size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
            v2.ToPureTensor(),
        ]
        try:
            super().__init__(os.fspath(root), v2.Compose(steps))
        except FileNotFoundError as error:
            raise MissingDataError(
                f'{os.fspath(root)!r} holds no images in a folder for each class: {error}'
            ) from error

    def digest(self) -> str:
        """A digest of the images, see `files_digest`."""
        return files_digest(
            self.root, [os.path.relpath(path, self.root) for path, _ in self.samples]
        )


def cache_latents(
    autoencoder: Any,
    images: ClassFolders,
    out: str | os.PathLike[str],
    batch_size: int = 32,
    num_workers: int = 0,
    dtype: str = 'float16',
) -> Path:
    """Writes the latents of images and of their mirror images; continues after an interruption.

    A bar on stderr shows the progress.

    Args:
        autoencoder: A diffusers `AutoencoderKL`, on the device to use.
        images: The images.
        out: The folder, which is returned.
        batch_size: Images at a time.
        num_workers: Processes that read images.
        dtype: 'float16', or 'float32' for twice the space.

    Raises:
        UsageError: The folder has a cache of other settings, images, or of another autoencoder.
        DataError: A latent is not finite, or too large for the type; or the disk has no room.
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
        autoencoder=digest_tensors(autoencoder.state_dict()),
        files=images.digest(),
    )
    done = _images_done(out, notes)
    if not done:
        out.mkdir(parents=True, exist_ok=True)
        for name, kind, sides in ((_MOMENTS, dtype, shape), (_LABELS, 'int64', (count,))):
            np.lib.format.open_memmap(out / name, 'w+', kind, sides)
        _note(out, notes, 0)
    starts = range(done, count, batch_size)
    batches = [list(range(start, min(start + batch_size, count))) for start in starts]
    loader: DataLoader[Any] = DataLoader(images, batch_sampler=batches, num_workers=num_workers)
    loaded: Any = track(loader, 'caching', console=Console(stderr=True))
    noted = done
    with _file_at(out / _MOMENTS, done) as moments, _file_at(out / _LABELS, done) as labels:
        for indices, (pixels, classes) in zip(batches, loaded, strict=True):
            with torch.inference_mode(), np.errstate(over='ignore'):
                rows = _moments(autoencoder, pixels).cpu().numpy().astype(dtype)
            if not np.isfinite(rows).all():
                raise DataError(
                    f'the latents of images {indices[0]} to {indices[-1]} are not finite in '
                    f"{dtype}: give dtype 'float32', and the autoencoder in fp32"
                )
            done = indices[-1] + 1
            flushed = done - noted >= _INTERVAL or done == count
            _write(moments, rows, flushed)
            _write(labels, classes.numpy().astype('int64'), flushed)
            if flushed:
                _note(out, notes, done)
                noted = done
    return out


def _file_at(path: Path, row: int) -> BinaryIO:
    """Opens the file of an array at the position of a row. Writing to a map hides a full disk."""
    array = _open_array(path)
    file = path.open('r+b')
    file.seek(array.offset + row * array[:1].nbytes)
    return file


def _write(file: BinaryIO, rows: np.ndarray, flushed: bool) -> None:
    try:
        file.write(rows.tobytes())
        if flushed:
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(f'{file.name!r} cannot be written: {error.strerror or error}') from error


def _moments(autoencoder: Any, pixels: Tensor) -> Tensor:
    """Mean and standard deviation `(B, 2, 2C, h, w)` of images and of their mirror images."""
    both = torch.stack([pixels, pixels.flip(-1)], dim=1).flatten(0, 1)
    parameter = next(autoencoder.parameters())
    gaussian = autoencoder.encode(both.to(parameter)).latent_dist
    return torch.cat([gaussian.mean, gaussian.std], dim=1).float().unflatten(0, (-1, 2))


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Digest of tensors in fp32, whatever type they are in."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f'{name} {tuple(value.shape)}'.encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _images_done(out: Path, notes: Mapping[str, Any]) -> int:
    """The number of images in a folder, whose cache must have the same settings."""
    if not (out / _NOTES).exists():
        return 0
    before = _read_notes(out)
    changed = [key for key in notes if before.get(key) != notes[key]]
    if changed:
        what = dict(
            autoencoder="another autoencoder's latents", files='the latents of other images'
        ).get(changed[0], 'a cache that was made with other settings')
        raise UsageError(
            f'{str(out)!r} has {what} ({changed[0]}: {before.get(changed[0])}, now '
            f'{notes[changed[0]]}): choose another folder'
        )
    return before['done']


def _read_notes(folder: Path) -> dict[str, Any]:
    """The record of a cache.

    Raises:
        MissingDataError: There is none.
        DataError: It is damaged.
    """
    path = folder / _NOTES
    if not path.exists():
        raise MissingDataError(
            f'{str(folder)!r} holds no cache of latents ({_NOTES} is missing): make one by '
            'tools/cache_latents.py'
        )
    try:
        notes = json.loads(path.read_bytes()) if path.is_file() else {}
        images, done, scale, shift = (notes[k] for k in ('images', 'done', 'scale', 'shift'))
        if not (
            type(images) is type(done) is int
            and 0 <= done <= images > 0
            and all(type(x) in (int, float) and math.isfinite(x) for x in (scale, shift))
            and scale != 0
            and isinstance(notes.get('classes', []), list)
        ):
            raise ValueError('a value is of another kind or out of range')
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f'{str(path)!r} is damaged ({type(error).__name__}: {error}): make the cache again by '
            'tools/cache_latents.py, in another folder'
        ) from error
    return notes


def _misfit(name: str, array: np.ndarray, count: int) -> str | None:
    """The layout that an array should have, if it has another."""
    floats, shape = array.dtype.kind == 'f', array.shape
    if len(array) != count or 0 in shape:
        return f'a row for {count} images'
    if name == 'moments' and (not floats or array.ndim != 5 or shape[1] != 2 or shape[2] % 2):
        return '(N, 2, 2C, h, w) of floats'
    if name == 'class_labels' and (floats or array.ndim != 1):
        return '(N,) integers'
    return None


def _open_array(path: Path) -> np.memmap:
    """A memory map of the numbers in a `.npy` file.

    Raises:
        DataError: It holds no array of numbers with rows, or not all of it.
    """
    try:
        if not path.is_file():
            raise ValueError('no regular file')
        array = np.lib.format.open_memmap(path, mode='r')
        if not array.ndim or array.dtype.kind not in 'fiu' or array.dtype.itemsize > 8:
            raise ValueError(f'{array.shape} of {array.dtype}')
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, RecursionError) as error:
        raise DataError(
            f'{str(path)!r} is not what a cache of latents holds ({error}): make it again'
        ) from error
    return array


def _require_whole(array: np.memmap) -> None:
    """Raises DataError if a file was shortened under its map, whose end cannot be read then."""
    file: Any = array.base
    if isinstance(file, mmap) and file.size() < array.offset + array.nbytes:
        raise DataError(
            f'{str(array.filename)!r} was shortened to {file.size()} bytes while it was read: make '
            'the cache again, in another folder'
        )


def _note(out: Path, notes: Mapping[str, Any], done: int) -> None:
    write_whole(out / _NOTES, json.dumps({**notes, 'done': done}, indent=1).encode())
