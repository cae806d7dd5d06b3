"""Latents of an autoencoder, computed once and read from a folder of plain arrays.

The folder holds `latents.json`; `moments.npy`, `(N, 2, 2C, h, w)`: mean and standard deviation of
each image's latents and of its mirror image's; and the conditions of each image, an array of N rows
for each name: `class_labels.npy`, or `encoder_hidden_states.npy` and `pooled_projections.npy`.
NumPy's plain arrays have only numbers, no code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

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


@DATASETS.register_module()
class CachedLatents(Dataset):
    """Latents written by `cache_latents`: a sample of each image's Gaussian, as in DiT's training.

    Args:
        data_root: The folder.
        flip: Whether to mirror half the images, at random.
        conditions: Names of the arrays of conditions; None for all.

    Raises:
        MissingDataError: There is no such cache.
        DataError: The cache is incomplete or damaged, or an array lacks a row for each image.
    """

    def __init__(
        self,
        data_root: str | os.PathLike[str],
        flip: bool = True,
        conditions: Sequence[str] | None = None,
    ) -> None:
        self.root, self.flip = Path(data_root), flip
        if not (self.root / _NOTES).is_file():
            raise MissingDataError(
                f'{str(self.root)!r} holds no cache of latents ({_NOTES} is missing): make one by '
                'tools/cache_latents.py'
            )
        self.notes = json.loads((self.root / _NOTES).read_bytes())
        count, done = self.notes['images'], self.notes['done']
        if done != count:
            raise DataError(
                f'the cache {str(self.root)!r} has {done} of {count} images: continue it by '
                'tools/cache_latents.py'
            )
        self.metainfo = dict(classes=self.notes.get('classes', []))
        if conditions is None:
            self.names = sorted(path.stem for path in self.root.glob('*.npy'))
        else:
            self.names = ['moments', *conditions]
        self._arrays: dict[str, np.ndarray] = {}
        for name, array in self.arrays.items():
            if len(array) != count:
                raise DataError(
                    f'{name}.npy in {str(self.root)!r} has {len(array)} rows for {count} images'
                )

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Memory maps of the arrays by name, opened separately in each process."""
        if not self._arrays:
            self._arrays = {name: _open_array(self.root / f'{name}.npy') for name in self.names}
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), '_arrays': {}}

    def __len__(self) -> int:
        return self.notes['images']

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`latents`, `(C, h, w)`, scaled for the diffusion model, and the image's conditions.

        Raises:
            DataError: A number is not finite, or a file has become shorter.
        """
        for array in self.arrays.values():
            _require_whole(array)
        # Copies in the machine's own byte order.
        rows = {n: a[index].astype(a.dtype.newbyteorder('=')) for n, a in self.arrays.items()}
        mirrored = int(self.flip and torch.rand(()) < 0.5)
        mean, deviation = torch.from_numpy(rows.pop('moments')[mirrored]).float().chunk(2)
        latents = mean + deviation * torch.randn(mean.shape)
        # Embeddings are often stored in half precision.
        values = {name: torch.as_tensor(row) for name, row in rows.items()}
        item = {n: v.float() if v.is_floating_point() else v.long() for n, v in values.items()}
        item['latents'] = (latents - self.notes['shift']) * self.notes['scale']
        for name, value in item.items():
            if not value.isfinite().all():
                file = _MOMENTS if name == 'latents' else f'{name}.npy'
                raise DataError(
                    f'image {index} of the cache {str(self.root)!r} is not finite in {file}: cache '
                    'the latents again, in fp32 if the autoencoder overflows'
                )
        return item


def _open_array(path: Path) -> np.ndarray:
    """A memory map of a `.npy` file.

    Raises:
        MissingDataError: There is no such file.
        DataError: It is no array, or not all of one.
    """
    if not path.is_file():
        raise MissingDataError(
            f'there is no {str(path)!r}: put an array with a row for each image there'
        )
    try:
        return np.load(path, mmap_mode='r', allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f'{str(path)!r} is damaged ({error}): make the cache again') from error


def _require_whole(array: Any) -> None:
    """Raises DataError if a file was shortened under its map: reading its end kills the process."""
    if isinstance(array.base, mmap) and array.base.size() < array.offset + array.nbytes:
        raise DataError(
            f'{str(array.filename)!r} was shortened while it was read: make the cache again, in '
            'another folder'
        )


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
        files = [os.path.relpath(path, self.root) for path, _ in self.samples]
        return files_digest(self.root, files)


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
        DataError: A latent is not finite, or too large for the type.
    """
    out = Path(out)
    count, config = len(images), autoencoder.config
    with torch.inference_mode():
        shape = (count, *_moments(autoencoder, images[0][0][None]).shape[1:])
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
    arrays = {_MOMENTS: (dtype, shape), _LABELS: ('int64', (count,))}
    if (out / _NOTES).exists():
        before = json.loads((out / _NOTES).read_bytes())
        done = before.pop('done')
        if changed := [key for key in notes if before.get(key) != notes[key]]:
            raise UsageError(
                f'{str(out)!r} has a cache of another kind ({changed[0]}: '
                f'{before.get(changed[0])}, now {notes[changed[0]]}): choose another folder'
            )
    else:
        done = 0
        out.mkdir(parents=True, exist_ok=True)
        for name, (kind, sides) in arrays.items():
            np.lib.format.open_memmap(out / name, 'w+', kind, sides)
    starts = range(done, count, batch_size)
    batches = [list(range(start, min(start + batch_size, count))) for start in starts]
    loader: DataLoader[Any] = DataLoader(images, batch_sampler=batches, num_workers=num_workers)
    loaded: Any = track(loader, 'caching', console=Console(stderr=True))
    # Not by a memory map, which hides a full disk.
    with (out / _MOMENTS).open('r+b') as moments, (out / _LABELS).open('r+b') as labels:
        for file, (kind, sides) in zip((moments, labels), arrays.values(), strict=True):
            row = np.dtype(kind).itemsize * int(np.prod(sides[1:]))
            file.seek((done - count) * row, os.SEEK_END)
        for indices, (pixels, classes) in zip(batches, loaded, strict=True):
            with torch.inference_mode(), np.errstate(over='ignore'):
                rows = _moments(autoencoder, pixels).cpu().numpy().astype(dtype)
            if not np.isfinite(rows).all():
                raise DataError(
                    f'the latents of images {indices[0]} to {indices[-1]} are not finite in '
                    f"{dtype}: give dtype 'float32', and the autoencoder in fp32"
                )
            for file, values in ((moments, rows), (labels, classes.numpy().astype('int64'))):
                file.write(values.tobytes())
                file.flush()
                os.fsync(file.fileno())
            written = json.dumps({**notes, 'done': indices[-1] + 1}, indent=1)
            write_whole(out / _NOTES, written.encode())
    return out


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
