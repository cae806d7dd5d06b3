"""Short table of the tensors of a checkpoint and their new names."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

_HEADINGS = ('', 'from', 'to, or why not', 'tensors')


def names_table(title: str, kinds: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    """Table of pairs (old name, new name or reason) by the kind of change.

    Names that differ only in numbers share a row.
    """
    rows = [_HEADINGS]
    for kind, pairs in kinds.items():
        counts = Counter((_pattern(old), _pattern(new)) for old, new in pairs)
        rows += [(kind, old, new, str(count)) for (old, new), count in counts.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        '  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return '\n'.join([title, *lines])


def _pattern(name: str) -> str:
    return re.sub(r'(?<=\.)\d+(?=\.)', '*', name)
