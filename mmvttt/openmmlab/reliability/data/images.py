"""Image files: missing, empty, cut off, no image at all, of another size than noted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from .findings import Findings, Scope

# EXIF's orientations that turn an image by a quarter; OpenCV and mmcv obey them.
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
_KEPT = 64
# By content, whatever the name: of an EPS, say, Pillow would start an interpreter of PostScript.
FORMATS = ('JPEG', 'PNG', 'BMP', 'TIFF', 'WEBP', 'PPM', 'GIF')


@dataclass(frozen=True)
class ImageFacts:
    """Contents of an image file, or why they cannot be known.

    Attributes:
        problem: A kind of problem as a plural, or None.
        size: (height, width) as the pipelines see it; None of an image of above 178 million
            pixels, which is not decoded whole.
        turned: Whether EXIF turns it by a quarter.
        deep: Whether it has more than 8 bits a channel.
    """

    problem: str | None
    size: tuple[int, int] | None = (0, 0)
    turned: bool = False
    deep: bool = False


def read_image(path: str) -> ImageFacts:
    """Decodes all of a file: a cut-off one is read by OpenCV, with grey rows where it ends."""
    if not os.path.isfile(path):
        return ImageFacts('images that are not there')
    if not os.path.getsize(path):
        return ImageFacts('images of no bytes')
    try:
        with Image.open(path, formats=FORMATS) as image:
            turned = image.getexif().get(_ORIENTATION) in _TURNED
            image.load()
            if image.format == 'TIFF' and image.mode in ('I', 'F'):
                return ImageFacts('TIFFs of 32 bits a channel, which OpenCV reads as no colours')
            size = image.size if turned else image.size[::-1]
            return ImageFacts(None, size, turned, image.mode.startswith(('I', 'F')))
    except UnidentifiedImageError:
        return ImageFacts('files that are no image')
    except Image.DecompressionBombError:
        return _of_a_large_one(path)
    except Exception as error:
        # Pillow's decoders raise nearly anything; with numbers that differ from file to file.
        reason = 'cut off' if 'truncated' in str(error) else type(error).__name__
        return ImageFacts(f'images that cannot be decoded ({reason})')


def _of_a_large_one(path: str) -> ImageFacts:
    """Whether OpenCV reads an image that is too large for Pillow's taste."""
    import cv2

    pixels = cv2.imread(path, cv2.IMREAD_REDUCED_GRAYSCALE_8)
    if pixels is None:
        return ImageFacts('images of more pixels than OpenCV reads (2^30), or damaged ones')
    return ImageFacts(None, None)


def check_images(
    images: Iterable[tuple[str, tuple[int, int] | None]], findings: Findings, scope: Scope
) -> None:
    """Decodes image files, several at a time; if not thorough, looks whether a few are there.

    Args:
        images: Path, and (height, width) where the annotations name it.
        findings: Where problems go.
        scope: Whether to look at images at all, and at which.
    """
    images = list(images) if scope.images else []
    if not scope.thorough:
        images = spread(images)
        missing = [path for path, _ in images if not os.path.isfile(path)]
        if missing:
            findings.error(
                f'{len(missing)} of {len(images)} images that were looked for are not there, such '
                f'as {missing[0]}; correct data_prefix, or the names in the annotations'
            )
        return
    facts = decoded(read_image, [path for path, _ in images], scope)
    for (path, noted), found in zip(images, facts, strict=True):
        if found.problem:
            findings.error(found.problem, path)
        elif None not in (noted, found.size) and found.size != noted:
            turned = ', turned by EXIF' if found.turned else ''
            findings.error(
                'images of another size than the annotations say',
                f'{path} (height and width {found.size}{turned}; annotated as {noted})',
            )
        if found.deep:
            findings.warn('images of 16 bits, read with 8', path)


def decoded(read: Callable[[str], Any], paths: list[str], scope: Scope) -> Iterator[Any]:
    """Findings of `read` in each file, several at a time: Pillow decodes without Python's lock."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        yield from scope.progress(pool.map(read, paths), total=len(paths))


def spread(items: list, count: int = _KEPT) -> list:
    """At most so many, evenly spread."""
    chosen = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[i] for i in chosen]
