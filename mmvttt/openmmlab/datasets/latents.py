"""Latents of an autoencoder, computed once and read from a folder of plain arrays.

The folder holds `latents.json`; `moments.npy`, `(N, 2, 2C, h, w)`: mean and standard deviation of
each image's latents and of its mirror image's; and the conditions of each image, an array of N rows
for each name: `class_labels.npy`, or `encoder_hidden_states.npy` and `pooled_projections.npy`.
NumPy's plain arrays have only numbers, no code.
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
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder

from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.errors import DataError, MissingDataError, UsageError
from mmvttt.pictures import open_picture

from ..registry import DATASETS

_NOTES = 'latents.json'


@DATASETS.register_module()
class CachedLatents(Dataset):
    """Latents written by `cache_latents`: a sample of each image's Gaussian, as in DiT's training.

    Args:
        data_root: The folder.
        flip: Whether to mirror half the images, at random.
        conditions: Names of the arrays of conditions; None for all.

    Raises:
        MissingDataError: There is no such cache.
        DataError: An array is missing, damaged, or lacks a row for each image.
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
        self.metainfo = dict(classes=self.notes.get('classes', []))
        if conditions is None:
            conditions = sorted({path.stem for path in self.root.glob('*.npy')} - {'moments'})
        self.names = ['moments', *conditions]
        for name in self.names:
            self._open(name)

    @property
    def files(self) -> list[Path]:
        """The files that decide what it returns."""
        return [self.root / _NOTES, *(self.root / f'{name}.npy' for name in self.names)]

    def _open(self, name: str) -> np.ndarray:
        """A memory map; it is opened for each image, since a pickled one holds the whole array."""
        path = self.root / f'{name}.npy'
        try:
            array = np.load(path, mmap_mode='r', allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f'{str(path)!r} cannot be read ({error}): put an array with a row for each image '
                'there, or make the cache again'
            ) from error
        if len(array) != len(self):
            raise DataError(f'{str(path)!r} has {len(array)} rows for {len(self)} images')
        return array

    def __len__(self) -> int:
        return self.notes['images']

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`latents`, `(C, h, w)`, scaled for the diffusion model, and the image's conditions."""
        rows = {name: self._open(name)[index] for name in self.names}
        mirrored = int(self.flip and torch.rand(()) < 0.5)
        # Copies in the machine's own byte order.
        moments = torch.from_numpy(rows.pop('moments')[mirrored].astype(np.float32))
        mean, deviation = moments.chunk(2)
        latents = mean + deviation * torch.randn(mean.shape)
        # Embeddings are often stored in half precision.
        item = {
            name: torch.as_tensor(row.astype(np.float32 if row.dtype.kind == 'f' else np.int64))
            for name, row in rows.items()
        }
        return item | dict(latents=(latents - self.notes['shift']) * self.notes['scale'])


class ClassFolders(ImageFolder):
    """Images in a folder for each class, in [−1, 1], for `cache_latents`.

    Args:
        root: The folder of folders; classes are numbered in the order of their names.
        size: The shorter side is resized to it, and the central square is cropped.

    Raises:
        MissingDataError: There is no such folder, or no image in it.
    """

    def __init__(self, root: str | os.PathLike[str], size: int) -> None:
        half = (0.5, 0.5, 0.5)
        prepare = create_transform(size, interpolation='bicubic', mean=half, std=half, crop_pct=1.0)
        try:
            super().__init__(os.fspath(root), prepare, loader=open_picture)
        except FileNotFoundError as error:
            raise MissingDataError(
                f'{os.fspath(root)!r} holds no images in a folder for each class: {error}'
            ) from error


def cache_latents(
    autoencoder: Any,
    images: ClassFolders,
    out: str | os.PathLike[str],
    batch_size: int = 32,
    num_workers: int = 0,
    dtype: str = 'float16',
) -> Path:
    """Writes the latents of images and of their mirror images.

    A bar on stderr shows the progress.

    Args:
        autoencoder: A diffusers `AutoencoderKL`, on the device to use.
        images: The images.
        out: The folder, which is returned.
        batch_size: Images at a time.
        num_workers: Processes that read images.
        dtype: 'float16', or 'float32' for twice the space.

    Raises:
        UsageError: The folder has a cache.
        DataError: A latent is not finite, or too large for the type.
    """
    out = Path(out)
    if (out / _NOTES).exists():
        raise UsageError(f'{str(out)!r} has a cache: choose another folder, or remove it')
    out.mkdir(parents=True, exist_ok=True)
    loader: DataLoader[Any] = DataLoader(images, batch_size, num_workers=num_workers)
    # Not by a memory map, which hides a full disk.
    with (out / 'moments.npy').open('wb') as file:
        for pixels, _ in track(loader, 'caching', console=Console(stderr=True)):
            with torch.inference_mode(), np.errstate(over='ignore'):
                rows = _moments(autoencoder, pixels).cpu().numpy().astype(dtype)
            if not np.isfinite(rows).all():
                raise DataError(
                    f"latents are not finite in {dtype}: give dtype 'float32', and the autoencoder "
                    'in fp32'
                )
            if not file.tell():
                shape = len(images), *rows.shape[1:]
                header = dict(descr=rows.dtype.str, fortran_order=False, shape=shape)
                np.lib.format.write_array_header_1_0(file, header)
            file.write(rows.tobytes())
    np.save(out / 'class_labels.npy', np.array(images.targets, np.int64))
    notes = dict(
        images=len(images),
        scale=autoencoder.config.scaling_factor,
        shift=autoencoder.config.get('shift_factor') or 0.0,
        classes=images.classes,
    )
    # Last: without it, the folder holds no cache.
    write_whole(out / _NOTES, json.dumps(notes, indent=1).encode())
    return out


def _moments(autoencoder: Any, pixels: Tensor) -> Tensor:
    """Mean and standard deviation `(B, 2, 2C, h, w)` of images and of their mirror images."""
    both = torch.stack([pixels, pixels.flip(-1)], dim=1).flatten(0, 1)
    parameter = next(autoencoder.parameters())
    gaussian = autoencoder.encode(both.to(parameter)).latent_dist
    return torch.cat([gaussian.mean, gaussian.std], dim=1).float().unflatten(0, (-1, 2))
