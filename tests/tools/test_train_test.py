"""`mmvttt TOOL`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmvttt import __main__

ROOT = Path(__file__).parents[2]


def test_mmvttt_runs_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    became = []
    monkeypatch.setattr(os, 'execv', lambda *args: became.append(args))
    for name, file in (('test', 'test'), ('predict', 'image_demo'), ('get-flops', 'get_flops')):
        __main__.main([name, 'c.py', '--out', 'a.pkl'])
        program, (python, tool, *arguments) = became.pop()
        assert program == python == sys.executable
        assert Path(tool).read_bytes() == (ROOT / f'tools/{file}.py').read_bytes()
        assert arguments == ['c.py', '--out', 'a.pkl']
    with pytest.raises(SystemExit, match=r"no tool 'trian', did you mean 'train'"):
        __main__.main(['trian'])


@pytest.mark.parametrize('command', [[__main__.tools()['weights']], ['-m', 'mmvttt']])
def test_a_reader_that_leaves_is_no_error(command: list[Any]) -> None:
    """As `mmvttt weights | head -1` has it."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, 'w') as gone:
        process = subprocess.run(
            [sys.executable, *command], stdout=gone, stderr=subprocess.PIPE, check=False
        )
    assert (process.returncode, process.stderr) == (1, b'')
