"""Tables as CSV files."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.atomic_write import replacing


def write_csv(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Writes rows atomically. The columns are all of their keys, in order of appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with replacing(path) as partial, partial.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, columns, lineterminator='\n')
        writer.writeheader()
        writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    return Path(path)


def cell(value: Any) -> Any:
    """A value of a CSV. A text that a spreadsheet would compute as a formula gets an apostrophe."""
    if not isinstance(value, str) or not value.startswith(('=', '+', '-', '@', '\t', '\r')):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
