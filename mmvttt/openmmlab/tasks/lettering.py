"""Letters of any script in pictures: Pillow's own font, or one of this machine that has them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

from mmvttt.text import one_line

Font = ImageFont.ImageFont | ImageFont.FreeTypeFont
_FOLDERS = {
    'win32': ['C:/Windows/Fonts'],
    'darwin': ['/System/Library/Fonts', '/Library/Fonts', '~/Library/Fonts'],
}.get(sys.platform, ['/usr/share/fonts', '/usr/local/share/fonts', '~/.local/share/fonts'])


@lru_cache(256)
def font_for(text: str, size: int) -> tuple[str, Font]:
    """A text as it can be written on one line, and a font of that size with all of its letters.

    Letters that no font has are written by their code points, `<884C>`, with a warning.
    """
    text = one_line(text)
    first = ImageFont.load_default(size)
    if not (lacking := _lacking(first, text)):
        return text, first
    for file in _files():
        try:
            font = ImageFont.truetype(file, size)
        except OSError:
            continue
        if not _lacking(font, text):
            return text, font
    warnings.warn(
        f'no font of this machine has all letters of {text!r}, which pictures show by their code '
        'points: install one, such as Noto',
        stacklevel=2,
    )
    return ''.join(f'<{ord(x):04X}>' if x in lacking else x for x in text), first


def _lacking(font: Font, text: str) -> set[str]:
    """Letters that a font draws like a code point that none has, or like their neighbour.

    Fonts of last resort draw one picture for all letters of a script.
    """
    box = _mask(font, '\uffff')
    masks = {x: _mask(font, x) for x in text if not x.isspace()}
    return {x for x, mask in masks.items() if mask in (None, box, _mask(font, chr(ord(x) ^ 1)))}


def _mask(font: Font, letter: str) -> bytes | None:
    try:
        return bytes(font.getmask(letter))
    except ValueError:
        # Raqm cannot shape all that Unicode reserves.
        return None


def _files() -> Iterator[str]:
    folders = list(_FOLDERS)
    if (matplotlib := find_spec('matplotlib')) and matplotlib.submodule_search_locations:
        folders.append(os.path.join(*matplotlib.submodule_search_locations, 'mpl-data/fonts/ttf'))
    for folder in folders:
        for file in sorted(Path(folder).expanduser().rglob('*.[ot]t[fc]')):
            yield os.fspath(file)
