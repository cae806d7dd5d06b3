"""Shows text from outside: names and paths of files, and what is written in them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection

_LONGEST = 2000


def shown(text: object, longest: int = _LONGEST) -> str:
    """A text for a screen or a log: control characters are escaped, the middle may be cut out.

    Line breaks stay: texts that are one line are shown by `one_line`.
    """
    text = str(text)
    if len(text) > longest:
        text = f'{text[: longest // 2]} … {text[-longest // 2 :]}'
    return ''.join(c if c.isprintable() or c == '\n' else repr(c)[1:-1] for c in text)


def one_line(text: object, longest: int = _LONGEST) -> str:
    """`shown`, with line breaks escaped: a name with one cannot add a line of its own."""
    return shown(text, longest).replace('\n', '\\n')


def command(*words: object) -> str:
    """A command line to paste into a shell. It is not cut: a name might end outside its quotes."""
    return shown(shlex.join(map(str, words)), sys.maxsize)


def listed(names: Collection[object], most: int = 8, longest: int = 60) -> str:
    """The first names of many, on one line; their number if there are more."""
    first = [str(name) for name, _ in zip(names, range(most), strict=False)]
    more = f', … ({len(names)})' if len(names) > most else ''
    return ', '.join(one_line(name, longest) for name in first) + more
