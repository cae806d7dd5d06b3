"""A table of what became of the tensors of a checkpoint, short enough to be read."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table


def names_table(title: str, kinds: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    """Pairs of a name and what it became, those that differ in numbers alone in one row.

    Args:
        title: Heading of the table.
        kinds: The pairs by what was done: `{'matched': [(old name, new name or reason), …], …}`.
    """
    table = Table('', 'from', 'to, or why not', 'tensors', title=title)
    for kind, pairs in kinds.items():
        rows = Counter((_pattern(old), _pattern(new)) for old, new in pairs)
        for (old, new), count in rows.items():
            table.add_row(kind, old, new, str(count))
    return as_text(table, 120)


def as_text(table: Table, width: int) -> str:
    """A table of rich as lines of at most so many characters."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _pattern(name: str) -> str:
    return re.sub(r'(?<=\.)\d+(?=\.)', '*', name)
