"""Public data sets of tests, which lie in the folder that MMVTTT_TEST_DATA names."""

import os
from pathlib import Path

import pytest

VARIABLE = 'MMVTTT_TEST_DATA'


def public_data(name: str) -> Path:
    """The folder of a public data set. Skips the test where there is none."""
    folder = Path(os.environ.get(VARIABLE) or os.devnull) / name
    if not folder.is_dir():
        pytest.skip(f'{name} is not in the folder that {VARIABLE} names')
    return folder
