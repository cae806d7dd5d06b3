"""tools/train.py and tools/test.py: their arguments, and the sentence where COCO is missing."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import mmvttt.apis.train

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / 'tools'


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of the tools into mmvttt, recorded instead of executed."""
    calls: list[dict[str, Any]] = []
    for name in ('train', 'evaluate'):
        monkeypatch.setattr(mmvttt.apis.train, name, lambda **kwargs: calls.append(kwargs))
    return calls


def run(monkeypatch: pytest.MonkeyPatch, tool: str, *args: str) -> None:
    monkeypatch.setattr(sys, 'argv', [tool, *args])
    runpy.run_path(str(TOOLS / tool), run_name='__main__')


def test_train_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch, calls: list) -> None:
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    options = ('--cfg-options', 'a.b=1', 'c=[1,2]')
    run(monkeypatch, 'train.py', 'c.py', '--amp', '--auto-scale-lr', '--seed', '3', *options)
    assert calls[-1] == dict(
        config='c.py',
        work_dir=None,
        resume=None,
        amp=True,
        auto_scale_lr=True,
        seed=3,
        deterministic=False,
        plain=False,
        compile=False,
        cfg_options={'a.b': 1, 'c': [1, 2]},
        launcher='none',
    )
    assert os.environ['LOCAL_RANK'] == '0'
    monkeypatch.delenv('LOCAL_RANK')


@pytest.mark.parametrize(
    ('args', 'resume'), [((), None), (('--resume',), 'auto'), (('--resume', 'a.pth'), 'a.pth')]
)
def test_resume(monkeypatch: pytest.MonkeyPatch, calls: list, args: tuple, resume: object) -> None:
    monkeypatch.setenv('LOCAL_RANK', '1')
    run(monkeypatch, 'train.py', 'c.py', *args, '--launcher', 'pytorch', '--local-rank', '0')
    assert calls[-1]['resume'] == resume
    assert calls[-1]['launcher'] == 'pytorch'
    assert os.environ['LOCAL_RANK'] == '1'


def test_test_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch, calls: list) -> None:
    monkeypatch.setenv('LOCAL_RANK', '0')
    run(monkeypatch, 'test.py', 'c.py', 'a.pth', '--out', 'p.pkl', '--show-dir', 'drawn')
    assert calls[-1] == dict(
        config='c.py',
        checkpoint='a.pth',
        work_dir=None,
        out='p.pkl',
        show_dir='drawn',
        tta=False,
        amp=False,
        pack=True,
        cuda_graph=False,
        cfg_options=None,
        launcher='none',
    )


@pytest.mark.parametrize(
    ('tool', 'words'),
    [
        ('train.py', '--work-dir --resume --amp --auto-scale-lr --seed --cfg-options --launcher'),
        ('test.py', '--work-dir --out --show-dir --cfg-options --launcher'),
    ],
)
def test_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tool: str, words: str
) -> None:
    with pytest.raises(SystemExit, match='0'):
        run(monkeypatch, tool, '--help')
    out = capsys.readouterr().out
    assert all(word in out for word in words.split())


def test_missing_coco_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv('MMVTTT_DATA', raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, 'train.py', str(ROOT / 'configs' / 'maskrcnn_vittt_s_1x.py'))
    assert stopped.value.code == 1
    output = capsys.readouterr()
    assert 'Traceback' not in output.err + output.out
    (line,) = [x for x in output.err.splitlines() if x.startswith('error: ')]
    assert 'The training data is missing' in line
    assert str(tmp_path / 'data' / 'coco') in line
    assert 'MMVTTT_DATA' in line
    assert '--cfg-options train_dataloader.dataset.data_root=PATH' in line


def test_an_option_without_a_value_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match='2'):
        run(monkeypatch, 'train.py', 'c.py', '--cfg-options', 'a=1', 'nonsense')
    assert "--cfg-options 'nonsense': write KEY=VALUE" in capsys.readouterr().err
