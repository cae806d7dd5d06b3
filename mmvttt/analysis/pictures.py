"""What the tools share that draw how a model sees images: reading them, panels, writing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import torch
from torch import Tensor
from torchvision.transforms.functional import normalize

from ..errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ImageNet's, as in the recipes.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read_image(path: Path, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """An image of a file, resized to (height, width): `(3, H, W)` from 0 to 1, and normalised.

    Raises:
        DataError: The file is missing or no image.
    """
    image = cv2.imread(str(path))
    if image is None:
        raise DataError(f'{str(path)!r} is no image that can be read')
    image = cv2.cvtColor(cv2.resize(image, size[::-1]), cv2.COLOR_BGR2RGB)
    picture = torch.from_numpy(image).permute(2, 0, 1) / 255
    return picture, normalize(picture, MEAN, STD)


def panels(
    count: int, columns: int, size: tuple[float, float] = (2.2, 2.4), frame: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels in rows, each of `size` (width, height) in inches.

    Without `frame` they are for images: no axes, and none where there is nothing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout='constrained')
    FigureCanvasAgg(figure)
    found = list(figure.subplots(rows, columns, squeeze=False).flat)
    for i, panel in enumerate(found):
        if not frame or i >= count:
            panel.axis('off')
    return figure, found[:count]


def show(panel: Axes, picture: Tensor, size: tuple[int, int] | None = None) -> None:
    """Draws an image `(3, H, W)`, or a map `(h, w)` over an image of `size` (H, W)."""
    if picture.dim() == 3:
        picture = picture.permute(1, 2, 0)
    height, width = size or picture.shape[:2]
    pixels = picture.detach().cpu().numpy()
    panel.imshow(pixels, extent=(0, width, height, 0), interpolation='nearest')
