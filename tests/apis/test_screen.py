"""What the screen shows of a training, and `--plain`."""

import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from mmvttt.checkpoints.load import LoadReport
from mmvttt.cli import command_line, plain_errors
from mmvttt.errors import DataError
from mmvttt.openmmlab.data.findings import Findings
from mmvttt.text import command


def test_plain_leaves_the_config_as_it_is(run: Callable) -> None:
    plain = run('train', work_dir='plain', plain=True, cfg_options={'train_cfg.max_epochs': 1})
    safe = run('train', work_dir='safe', cfg_options={'train_cfg.max_epochs': 1})
    names = [{type(h).__name__: type(h).__module__ for h in r.hooks} for r in (plain, safe)]
    assert 'AnomalyHook' in set(names[1]) - set(names[0])
    assert names[0]['CheckpointHook'].startswith('mmengine')
    assert names[1]['CheckpointHook'].startswith('mmvttt')


def test_the_screen_shows_a_summary_and_the_log_all(
    run: Callable, capfd: pytest.CaptureFixture
) -> None:
    runner = run('train', work_dir='a', cfg_options={'train_cfg.max_epochs': 1})
    printed = ''.join(capfd.readouterr())
    assert 'model     TinyModel, 0.0 M parameters\nweights   random\nwrites    ' in printed
    (log,) = Path(runner.log_dir).glob('*.log')
    for hidden in ('val_evaluator', 'System environment', 'before_train_epoch'):
        assert hidden not in printed
        assert hidden in log.read_text()
    # All else is what the hooks say: the rates, a step, a checkpoint, an evaluation.
    lines = printed[printed.index('model     TinyModel') :].splitlines()[3:]
    assert [w for w in ('Epoch(train)', 'Epoch(val)') if not any(w in x for x in lines)] == []
    assert len(lines) <= 10, printed
    # A test shows its tables.
    run('evaluate', 'a/epoch_1.pth', work_dir='b')
    printed = ''.join(capfd.readouterr())
    assert 'Epoch(test)' in printed
    assert 'System environment' not in printed


def test_a_command_to_paste_is_one_of_words() -> None:
    words = ('mmvttt', 'finetune', "it's; touch ran\n$(touch ran)", "'; touch ran" * 1000)
    assert shlex.split(command(*words)) == [*words]
    assert '\x1b' not in command('\x1b]0;')


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match='130'), plain_errors(stopped='stopped; again'):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == 'stopped; again\n'


STRANGE = 'cat\x1b]0;title\x07\nerror: the disk is full'


def test_a_name_adds_no_line_to_what_is_said(capsys: pytest.CaptureFixture) -> None:
    findings = Findings('train', account=[f'{STRANGE}: 3 pictures'])
    findings.error(f'no file of {STRANGE}')
    report = LoadReport([], [], [STRANGE], [])
    with pytest.raises(SystemExit), plain_errors():
        raise DataError(STRANGE)
    for text, lines in ((findings, 3), (report, 2), (capsys.readouterr().err, 1)):
        assert len(str(text).splitlines()) == lines
        assert '\x1b' not in str(text)


def test_a_name_adds_no_line_to_an_error_of_arguments_or_a_warning(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, 'formatwarning', None)
    monkeypatch.setattr(sys, 'excepthook', None)
    parser = command_line('Predicts.')
    with pytest.raises(SystemExit, match='2'):
        parser.parse_args([STRANGE, '--\x9b2J'])
    warning = warnings.formatwarning(UserWarning(f'no letters {STRANGE}'), UserWarning, 'a.py', 1)
    assert len(warning.splitlines()) == 1
    for text in (capsys.readouterr().err, warning):
        assert all(c.isprintable() or c == '\n' for c in text)
        assert r'cat\x1b]0;title\x07\nerror' in text
    # Messages of Python and torch may have several lines.
    error = RuntimeError(STRANGE)
    sys.excepthook(RuntimeError, error, None)
    assert r'RuntimeError: cat\x1b]0;title\x07' in capsys.readouterr().err


@pytest.mark.parametrize('rank', ['0', '1'])
def test_one_process_of_a_node_shows_warnings(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('LOCAL_RANK', rank)
    monkeypatch.setattr(warnings, 'formatwarning', None)
    monkeypatch.setattr(sys, 'excepthook', None)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter('default')
        command_line('Trains.')
        warnings.warn('no letters', UserWarning, stacklevel=1)
    assert len(log) == (rank == '0')
