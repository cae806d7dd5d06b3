"""docs/stability.md lists what exists, and all of what mmvttt shows first."""

import re
from pathlib import Path
from pkgutil import resolve_name

import mmvttt
import ttt_kernels

PAGE = (Path(__file__).parents[2] / 'docs' / 'stability.md').read_text(encoding='utf-8')
NAMES = {
    name
    for row in re.findall(r'^\| (`(?:mmvttt|ttt_kernels)[^|]*) \|', PAGE, re.MULTILINE)
    for name in re.findall(r'`([\w.]+)`', row)
}


def test_every_public_name_exists() -> None:
    for name in NAMES:
        assert resolve_name(name) is not None, name


def test_names_of_the_package_and_all_ops_are_public() -> None:
    first = {f'mmvttt.{name}' for name in mmvttt.__all__ if name != '__version__'}
    helpers = {'BACKENDS', 'available', 'decompositions'}
    ops = {f'ttt_kernels.{name}' for name in ttt_kernels.__all__ if name not in helpers}
    assert first | ops <= NAMES
