"""Completeness of every op: the places that CONTRIBUTING.md lists, and a row of ops.py."""

import re
from pathlib import Path

import pytest
from ops import OPS

import ttt_kernels

ROOT = Path(__file__).resolve().parents[2]
NAMES = tuple(ttt_kernels.available())
ROW = re.search(r'^\| an op \|(.*)\|$', (ROOT / 'CONTRIBUTING.md').read_text(), re.MULTILINE)[1]
# Files to add have `<op>` in their names; the others name the op.
PLACES = [
    place.replace(f'{{{names}}}', name)
    for place in re.findall(r'`([^`]+)`', ROW)
    for names in [re.search(r'\{(.*?)\}|$', place)[1] or '']
    for name in names.split(',')
]


def lacks(op: str, place: str) -> str | None:
    """Name of what is missing from an op in one place, or None."""
    path = ROOT / place.replace('<op>', op)
    if '<op>' in place:
        return None if path.is_file() else f'the file {place.replace("<op>", op)}'
    files = path.glob('*.py') if path.is_dir() else [path]
    if any(re.search(rf'\b{op}\b', file.read_text()) for file in files):
        return None
    return f'its name in {place}'


@pytest.mark.parametrize('op', NAMES)
def test_an_op_has_everything(op):
    missing = [reason for place in PLACES if (reason := lacks(op, place))]
    if op not in {row.name for row in OPS.values()}:
        missing.append('a row in tests/kernels/ops.py')
    if op not in ttt_kernels.__all__:
        missing.append('its name in ttt_kernels.__all__')
    assert not missing, f'{op} lacks {", ".join(missing)}: see CONTRIBUTING.md, "Where things go"'
