"""Model, images and output folder, shared by the diagnostics of tools/inspect_model.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..named_model import read_picture
from .inner_training import LayerTraining, training_of
from .mixers import Mixing, backbone_of, record_mixers
from .pictures import save
from .tables import write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Largest number of layers in a picture; tables have all.
_DRAWN = 6


@dataclass(frozen=True)
class Look:
    """A model, images, and the output folder.

    Attributes:
        model: A model in any mode, which runs in evaluation mode.
        files: The images.
        size: (height, width) to which they are resized.
        out: Folder of the pictures and tables.
        prepare: RGB in [0, 1], `(3, H, W)` → what the model takes, `(C, H, W)`.
        queries: Positions (row, column) in [0, 1] whose implicit attention is drawn.
    """

    model: nn.Module
    files: Sequence[Path]
    size: tuple[int, int]
    out: Path
    prepare: Callable[[Tensor], Tensor]
    queries: Sequence[tuple[float, float]] = ((0.5, 0.5),)

    @cached_property
    def images(self) -> list[tuple[Tensor, Tensor]]:
        """Each image to draw, `(3, H, W)`, and as the model gets it."""
        pictures = [read_picture(path, self.size) for path in self.files]
        return [(picture, self.prepare(picture)) for picture in pictures]

    @cached_property
    def names(self) -> dict[Path, str]:
        """Names of the images without folder and suffix, numbered where they are not unique."""
        stems = Counter(path.stem for path in self.files)
        return {
            path: path.stem if stems[path.stem] == 1 else f'{path.stem}_{i}'
            for i, path in enumerate(self.files)
        }

    @cached_property
    def mixings(self) -> list[list[Mixing]]:
        """The mixers on each image, as their backbone runs."""
        backbone = backbone_of(self.model)
        return [record_mixers(backbone, image[None]) for _, image in self.images]

    @cached_property
    def trainings(self) -> list[list[LayerTraining]]:
        """The inner training of each image's mixers. Mixers without one are reported once."""
        followed = [[training_of(mixing) for mixing in mixings] for mixings in self.mixings]
        for mixing, layer in zip(self.mixings[0], followed[0], strict=True):
            if layer is None:
                print(f'{mixing.name} ({type(mixing.mixer).__name__}): no inner training is seen')
        if not any(followed[0]):
            raise UsageError(
                f'no mixer of {type(self.model).__name__} trains anything at test time: '
                "'erf', 'attention' and 'keys' work without an inner training",
                'what',
            )
        return [[layer for layer in layers if layer is not None] for layers in followed]

    @property
    def counted(self) -> str:
        """The number of images, for titles."""
        return f'mean over {len(self.files)} images' if len(self.files) > 1 else 'one image'

    def save(self, figure: Figure, name: str) -> Path:
        """Writes a picture."""
        return save(figure, self.out / f'{name}.png')

    def table(self, name: str, columns: Sequence[str], rows: Sequence[tuple]) -> Path:
        """Writes rows of a name and numbers as a CSV, and prints them."""
        path = self.out / f'{name}.csv'
        lines = [(row[0], *(f'{value:.5g}' for value in row[1:])) for row in rows]
        write_csv([dict(zip(columns, line, strict=True)) for line in lines], path)
        for row, *values in lines:
            numbers = ', '.join(f'{c} {v}' for c, v in zip(columns[1:], values, strict=True))
            print(f'{name}: {row}: {numbers}')
        return path


def spread(layers: Sequence) -> list:
    """Layers evenly spread from the first to the last, as many as a picture has room for."""
    count = min(_DRAWN, len(layers))
    return [layers[round(i * (len(layers) - 1) / max(count - 1, 1))] for i in range(count)]


def means(rows: Iterable[tuple]) -> list[tuple]:
    """Means over the images of rows that begin with the same name, without NaNs."""
    by_name: dict[str, list[tuple]] = {}
    for name, *values in rows:
        by_name.setdefault(name, []).append(tuple(values))
    return [
        (name, *torch.tensor(values, dtype=torch.float64).nanmean(0).tolist())
        for name, values in by_name.items()
    ]
