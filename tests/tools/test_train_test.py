"""tools/train.py and tools/test.py: their arguments, and the sentence where COCO is missing."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mmvttt import __main__
from mmvttt.openmmlab import apis
from mmvttt.openmmlab.apis import evaluate as _evaluate  # noqa: F401
from mmvttt.openmmlab.apis import train as _train  # noqa: F401

ROOT = Path(__file__).parents[2]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of the tools into mmvttt, recorded instead of executed."""
    calls: list[dict[str, Any]] = []
    for module, name in ((apis.train, 'train'), (apis.evaluate, 'evaluate')):
        monkeypatch.setattr(module, name, lambda **kwargs: calls.append(kwargs))
    return calls


@pytest.mark.parametrize(
    ('args', 'resume'), [((), None), (('--resume',), 'auto'), (('--resume', 'a.pth'), 'a.pth')]
)
def test_resume(
    tools: Any, monkeypatch: pytest.MonkeyPatch, calls: list, args: tuple, resume: object
) -> None:
    monkeypatch.setenv('LOCAL_RANK', '1')
    tools('train.py', 'c.py', *args, '--launcher', 'pytorch', '--local-rank', '0')
    assert calls[-1]['resume'] == resume
    assert calls[-1]['launcher'] == 'pytorch'
    assert os.environ['LOCAL_RANK'] == '1'


def test_mmvttt_runs_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    became = []
    monkeypatch.setattr(os, 'execv', lambda *args: became.append(args))
    for name, file in (('test', 'test'), ('predict', 'image_demo'), ('get-flops', 'get_flops')):
        __main__.main([name, 'c.py', '--out', 'a.pkl'])
        program, (python, tool, *arguments) = became.pop()
        assert program == python == sys.executable
        assert Path(tool).read_bytes() == (ROOT / f'tools/{file}.py').read_bytes()
        assert arguments == ['c.py', '--out', 'a.pkl']
    with pytest.raises(SystemExit, match=r"no tool 'trian'; it has .*, train\b"):
        __main__.main(['trian'])


def test_an_option_without_a_value_is_a_usage_error(tools: Any) -> None:
    error = tools.error('train.py', 'c.py', '--cfg-options', 'a=1', 'nonsense', status=2)
    assert "--cfg-options 'nonsense': write KEY=VALUE" in error
