"""Checks of image files: missing, empty, truncated, no image, of another size than annotated."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import cv2
import numpy as np
from rich.console import Console
from rich.progress import track

from mmvttt.pictures import (
    FLOATS,
    SUFFIXES,
    ImageError,
    LargeImageError,
    dark,
    open_image,
    whole_header,
)

from .findings import Findings

# EXIF orientations with a rotation by 90°; OpenCV and mmcv apply them.
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
# How many files are looked at, and decoded, before a training.
_SEARCHED, _DECODED = 20_000, 4
# Modes of Pillow that OpenCV may not read: 32 bits a channel.
_WIDE = {'F': FLOATS, 'I': 'images of 32-bit integers, which OpenCV does not read'}


@dataclass(frozen=True)
class ImageFacts:
    """Properties of an image file, or why it cannot be read.

    Attributes:
        problem: Kind of problem, in the plural, or None.
        size: (height, width) as the pipelines see it; None above 178 million pixels, which are not
            decoded.
        turned: Whether EXIF rotates it by 90°.
        largest: Its largest number, if it has 16 bits and the upper 8 hold hardly anything.
    """

    problem: str | None
    size: tuple[int, int] | None = (0, 0)
    turned: bool = False
    largest: int | None = None


def read_image(path: str) -> ImageFacts:
    """Decodes a whole file, because OpenCV reads a truncated one with grey rows at its end."""
    try:
        image, deep = open_image(path)
    except LargeImageError:
        # Beyond Pillow's limit, and within OpenCV's.
        return ImageFacts(None, None)
    except ImageError as error:
        return ImageFacts(error.kind)
    turned = image.getexif().get(_ORIENTATION) in _TURNED
    size = image.size if turned else image.size[::-1]
    # Pillow opens several kinds of 16 bits as 'I', too.
    problem = _WIDE.get(image.mode)
    if problem and cv2.imread(path, cv2.IMREAD_COLOR) is not None:
        problem = None
    return ImageFacts(problem, size, turned, dark(image) if deep else None)


def glance(path: str) -> ImageFacts:
    """`read_image` without decoding a whole JPEG or PNG of 8 bits."""
    header = whole_header(path)
    if header is None:
        return read_image(path)
    size, orientation = header
    turned = orientation in _TURNED
    return ImageFacts(None, size[::-1] if turned else size, turned)


def check_images(images: Iterable[tuple[str, tuple[int, int] | None]], findings: Findings) -> None:
    """Decodes image files, given with (height, width) or None; else checks that a few exist."""
    images = list(images) if findings.images else []
    if not findings.thorough:
        images = spread(images)
        missing = [path for path, _ in images if not os.path.isfile(path)]
        if missing:
            findings.error(
                f'{len(missing)} of {len(images)} images that were checked do not exist, such as '
                f'{missing[0]}; correct data_prefix, or the names in the annotations'
            )
            return
        images = spread(images, _DECODED)
    facts = decoded(read_image, [path for path, _ in images], findings.thorough)
    for (path, noted), image in zip(images, facts, strict=True):
        if image.largest is not None:
            findings.warn(
                'images of 16 bits of which the upper 8, which models get, are nearly empty: scale '
                'their numbers up to 65535',
                f'{path} (at most {image.largest} of 255)',
            )
        if image.problem:
            findings.error(image.problem, path)
        elif None not in (noted, image.size) and image.size != noted:
            turned = ', turned by EXIF' if image.turned else ''
            findings.error(
                'images of another size than annotated',
                f'{path} (height and width {image.size}{turned}; annotated as {noted})',
            )


def check_unread(
    folder: str, suffixes: tuple[str, ...], findings: Findings, *, case: bool = True
) -> None:
    """Warns of pictures in a folder that are not read because of other suffixes.

    `case`: whether capitals matter in the suffixes.
    """
    files = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
    for path in itertools.islice(files, None if findings.thorough else _SEARCHED):
        name = path.lower()
        if name.endswith(SUFFIXES) and not (path if case else name).endswith(suffixes):
            findings.warn(
                f'pictures that are not read, because their names do not end in '
                f'{" or ".join(suffixes)}',
                path,
            )


def real_paths(paths: Iterable[str], thorough: bool) -> set[str]:
    """The files behind paths; if not thorough, only links of folders are followed, in seconds."""
    if thorough:
        return set(map(os.path.realpath, paths))
    real_folder = cache(os.path.realpath)
    return {os.path.join(real_folder(os.path.dirname(p)), os.path.basename(p)) for p in paths}


def decoded(read: Callable[[str], Any], paths: list[str], bar: bool = False) -> Iterator[Any]:
    """`read` of each file, in threads: Pillow decodes without holding the GIL."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        read_files: Iterable[Any] = pool.map(read, paths)
        console = Console(stderr=True)
        if bar and console.is_terminal:
            read_files = track(read_files, 'files', len(paths), console=console, transient=True)
        yield from read_files


def spread(items: list, count: int = 64) -> list:
    """At most `count` items, evenly spaced."""
    chosen = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[i] for i in chosen]
