"""A table of what became of the tensors of a checkpoint, short enough to be read."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

_HEADINGS = ('', 'from', 'to, or why not', 'tensors')


def names_table(title: str, kinds: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    """Pairs of a name and what it became, those that differ in numbers alone in one row.

    Args:
        title: Heading of the table.
        kinds: The pairs by what was done: `{'matched': [(old name, new name or reason), …], …}`.
    """
    rows = [_HEADINGS]
    for kind, pairs in kinds.items():
        found = Counter((_pattern(old), _pattern(new)) for old, new in pairs)
        rows += [(kind, old, new, str(count)) for (old, new), count in found.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        '  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return '\n'.join([title, *lines])


def _pattern(name: str) -> str:
    return re.sub(r'(?<=\.)\d+(?=\.)', '*', name)
