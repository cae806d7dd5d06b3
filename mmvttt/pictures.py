"""Opens image files. Only this module of the package decodes them with Pillow."""

from __future__ import annotations

import os
import warnings
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .errors import DataError, first_line

# Formats by content, whatever the name: Pillow would start Ghostscript to read an EPS, for example.
FORMATS = ('JPEG', 'PNG', 'BMP', 'TIFF', 'WEBP', 'PPM', 'GIF', 'JPEG2000', 'AVIF')
# Suffixes of these formats.
SUFFIXES = (
    *('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp', '.ppm', '.pgm', '.gif'),
    *('.jp2', '.avif', '.jfif'),
)
# Largest number, of 255, of a 16-bit picture that uses 14 of its bits.
_DARK = 63
# Largest download of a picture, and the time its server has to answer.
_BYTES, _SECONDS = 100_000_000, 30
# Where EXIF has the orientation, and the last bytes of a JPEG, in which it says that it ends.
_ORIENTATION, _END = 0x0112, 4096
# A kind of images that Pillow reads and OpenCV does not.
FLOATS = 'images of floating-point numbers, which OpenCV does not read'


class ImageError(DataError):
    """An image file cannot be read. `kind` names files like it, in the plural."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class LargeImageError(ImageError):
    """An image has too many pixels to be decoded without asking."""


def fetch_image(url: str, folder: str | os.PathLike[str]) -> str:
    """Downloads a picture into a folder, and returns its file. What it is, `open_image` tells.

    Raises:
        ImageError: The address cannot be read, or has more than 100 MB.
    """
    from .checkpoints.download import without_secrets

    name = os.path.basename(urlsplit(url).path)
    name = ''.join(c if c.isalnum() or c in '.-_' else '_' for c in name)[-80:].lstrip('.')
    try:
        with urlopen(Request(url, headers={'User-Agent': 'mmvttt'}), timeout=_SECONDS) as answer:
            content = answer.read(_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise ImageError(
            'addresses that cannot be read',
            f'{without_secrets(url)!r} cannot be read: {first_line(error)}',
        ) from error
    if len(content) > _BYTES:
        raise ImageError(
            'pictures that are too large to be downloaded',
            f'{without_secrets(url)!r} has more than {_BYTES // 10**6} MB: download it, and give '
            'the file',
        )
    path = os.path.join(folder, name or 'picture')
    with open(path, 'wb') as file:
        file.write(content)
    return path


def open_image(path: str | os.PathLike[str]) -> tuple[Image.Image, bool]:
    """Decodes a whole file, and returns its image and whether it has 16 bits a channel.

    Pillow reads only the upper 8 of 16 bits a channel of colours.

    Raises:
        LargeImageError: It has more than 178 million pixels, `2 * PIL.Image.MAX_IMAGE_PIXELS`.
        ImageError: It is missing, empty, damaged, not a file, or not one of `FORMATS`.
    """
    name = repr(os.fspath(path))
    if not os.path.isfile(path):
        raise ImageError('images that do not exist', f'there is no image {name}')
    if not os.path.getsize(path):
        raise ImageError('empty images', f'{name} is empty: give another image')
    try:
        with Image.open(path, formats=FORMATS) as image:
            deep = any(map(_has_16_bits, image.tile))
            image.load()
            return image, deep
    except UnidentifiedImageError as error:
        raise ImageError(
            'files that are not images',
            f'{name} is not an image: give one of {", ".join(FORMATS)}',
        ) from error
    except Image.DecompressionBombError as error:
        raise LargeImageError(
            'images that are too large to be checked',
            f'{name} has more pixels than a trusted image: cut it into parts, or raise '
            'PIL.Image.MAX_IMAGE_PIXELS',
        ) from error
    except Exception as error:
        # Pillow's decoders raise errors of any type, with numbers that differ between files.
        raise ImageError(
            'images that cannot be decoded (damaged or truncated)',
            f'{name} cannot be decoded: it is damaged or truncated',
        ) from error


def _has_16_bits(tile: tuple[Any, ...]) -> bool:
    """Whether the last item of a tile of Pillow's has a raw mode such as `RGB;16B`."""
    raw = tile[3][0] if isinstance(tile[3], tuple) and tile[3] else tile[3]
    return isinstance(raw, str) and raw.partition(';')[2].startswith('16')


def whole_header(path: str | os.PathLike[str]) -> tuple[tuple[int, int], int | None] | None:
    """(height, width) and EXIF's orientation of a JPEG that ends as one does, or a sound PNG.

    None for every other file, and for PNGs of 16 bits: what these are, decoding says.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            with Image.open(path, formats=('JPEG', 'PNG')) as image:
                size, orientation = image.size[::-1], image.getexif().get(_ORIENTATION)
                if image.format == 'PNG':
                    image.verify()
                    return None if image.mode.startswith('I') else (size, orientation)
        with open(path, 'rb') as file:
            file.seek(max(0, os.path.getsize(path) - _END))
            return (size, orientation) if b'\xff\xd9' in file.read() else None
    except Exception:
        # A decoder may raise any type of error.
        return None


def open_picture(path: str | os.PathLike[str]) -> Image.Image:
    """Opens a photograph as OpenCV does: RGB, upright, the upper 8 of 16 bits (see `open_image`).

    Warns if the upper 8 bits hold hardly anything.
    """
    image, deep = open_image(path)
    if image.mode == 'F':
        raise ImageError(
            FLOATS, f'{os.fspath(path)!r} has floating-point numbers: write it with 8 or 16 bits'
        )
    if deep and (largest := dark(image)) is not None:
        warnings.warn(
            f'{os.fspath(path)!r} has 16 bits a channel, of which models get the upper 8: the '
            f'largest of its numbers is then {largest} of 255. Scale them up to 65535',
            stacklevel=2,
        )
    return _eight_bits(ImageOps.exif_transpose(image)).convert('RGB')


def dark(image: Image.Image) -> int | None:
    """The largest number of a 16-bit image in its upper 8 bits if these hold hardly anything."""
    largest = int(np.asarray(_eight_bits(image)).max())
    return largest if largest <= _DARK else None


def _eight_bits(image: Image.Image) -> Image.Image:
    if not image.mode.startswith('I'):
        return image
    return Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
