"""Patches run once, say what they did, and `python -m mmvttt` prints it."""

import logging
import re
from importlib import import_module
from pathlib import Path

import mmengine.logging
import pytest
import torch
from mmengine.runner.checkpoint import load_checkpoint

from mmvttt import __main__ as report
from mmvttt.openmmlab import compat

from ..processes import python


def test_a_patch_is_applied_once() -> None:
    before = compat.outcomes()
    compat.apply_patches()
    assert compat.outcomes() == before
    assert [*before] == [p.name for p in compat.PATCHES]


@pytest.mark.parametrize('patched', compat.PATCHES, ids=lambda p: p.name)
def test_its_module_and_its_repair_are_there(patched: compat.Patch) -> None:
    import_module(patched.target)
    outcome = compat.outcomes()[patched.name] or ''
    assert not outcome.startswith(('failed', patched.target)), outcome


def test_what_is_loaded_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    torch.save({'other': torch.zeros(1)}, tmp_path / 'a.pth')
    logger = mmengine.logging.MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    load_checkpoint(model, str(tmp_path / 'a.pth'))
    logger.removeHandler(caplog.handler)
    assert 'Loads checkpoint' in caplog.text
    assert 'unexpected key' in caplog.text


def test_a_name_in_a_log_line_sets_no_terminal(tmp_path: Path) -> None:
    logger = mmengine.logging.MMLogger('strange', log_file=str(tmp_path / 'a.log'))
    logger.warning('a class named \x1b]0;title\x07 in %s', 'größe\nx')
    written = (tmp_path / 'a.log').read_text()
    assert '\x1b' not in written
    assert r'\x1b]0;title\x07 in größe' in written


OUTCOMES = """
import sys, types
from mmvttt.openmmlab import compat

def repair(): calls.append(1)
def leave(): return 'it is whole'
def fail(): raise AttributeError('renamed')

calls = []
here = types.ModuleType('here')
here.repair, here.leave, here.fail = repair, leave, fail
sys.modules['mmvttt.openmmlab.compat.here'] = here
assert 'wave' not in sys.modules
names = ('repair', 'leave', 'fail', 'coco-eval')
compat.PATCHES = tuple(compat.Patch(name, 'wave', f'here:{name}') for name in names)
compat._outcomes.clear()
compat.apply_patches()
*waiting, skipped = compat.outcomes().values()
assert set(waiting) == {'wave has not been imported'}
assert skipped == 'left out by MMVTTT_SKIP_PATCHES'
import wave
compat.apply_patches()
assert calls == [1]
applied, whole, failed, _ = compat.outcomes().values()
assert (applied, whole, failed) == (None, 'it is whole', 'failed: AttributeError: renamed')
assert type(wave.__spec__.loader).__name__ == 'SourceFileLoader'
"""


def test_outcomes() -> None:
    python(OUTCOMES, MMVTTT_SKIP_PATCHES='startup, coco-eval')


def test_an_unknown_name_is_an_error_that_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MMVTTT_SKIP_PATCHES', 'whole-file')
    with pytest.raises(ValueError, match="'whole-files'"):
        compat.apply_patches()


def test_the_table_in_the_documents_is_complete() -> None:
    page = Path(__file__).parents[2] / 'docs' / 'patches.md'
    rows = re.findall(r'^\| `([\w-]+)` \|', page.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(['startup', *(p.name for p in compat.PATCHES)])


def test_report(capsys: pytest.CaptureFixture) -> None:
    report.main([])
    output = capsys.readouterr().out
    for word in ('torch', 'mmdet', 'Patches', 'ttt_linear', 'reference yes'):
        assert word in output
    # A terminal's screen.
    assert len(output.splitlines()) <= 30
    report.main(['--patches'])
    output = capsys.readouterr().out
    assert all(p.name in output for p in compat.PATCHES)


def test_what_is_for_debugging_is_not_printed(capsys: pytest.CaptureFixture) -> None:
    for level, printed in ((logging.DEBUG, ''), (logging.INFO, 'text\n')):
        mmengine.logging.print_log('text', level=level)
        assert capsys.readouterr().out == printed
