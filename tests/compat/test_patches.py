"""Patches run once, say what they did, and `python -m mmvttt` prints it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmvttt import __main__ as report
from mmvttt.openmmlab import compat
from mmvttt.openmmlab.compat import patch


def test_every_patch_ran_once_and_has_a_reason() -> None:
    before = compat.patches()
    compat.apply_patches()
    assert compat.patches() == before
    assert len({m.name for m in before}) == len(before)
    assert all(m.why and m.unneeded != '' for m in before)


def test_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ('_REPAIRS', '_DONE'):
        monkeypatch.setattr(patch, name, {})

    @patch.patch('broken', 'it was broken')
    def repair() -> None:
        calls.append(1)

    @patch.patch('whole', 'it may break')
    def leave() -> str:
        return 'it is whole'

    patch.apply_patches()
    patch.apply_patches()
    assert calls == [1]
    broken, whole = patch.patches()
    assert broken.applied
    assert not whole.applied
    assert whole.unneeded == 'it is whole'


SKIPS = """
from mmengine.fileio import LocalBackend
put = LocalBackend.put
from mmvttt import compat
applied = {m.name for m in compat.patches() if m.applied}
assert 'whole-files' not in applied and LocalBackend.put is put
assert {'safe-load', 'own-configs', 'package-names', 'plain-curves'} <= applied
"""


def test_any_can_be_left_out() -> None:
    environment = os.environ | {'MMVTTT_SKIP_PATCHES': 'startup, whole-files'}
    subprocess.run([sys.executable, '-c', SKIPS], check=True, env=environment)


def test_an_unknown_name_is_an_error_that_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MMVTTT_SKIP_PATCHES', 'whole-file')
    with pytest.raises(ValueError, match=r"SKIP_PATCHES=whole-file: .* did you mean 'whole-files'"):
        compat.apply_patches()


def test_the_table_in_the_documents_is_complete() -> None:
    page = Path(__file__).parents[2] / 'docs' / 'patches.md'
    rows = re.findall(r'^\| `([\w-]+)` \|', page.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(['startup', *(m.name for m in compat.patches())])


def test_report(capsys: pytest.CaptureFixture) -> None:
    """In a process of its own: test_slim_machine.py."""
    report.main([])
    output = capsys.readouterr().out
    for word in ('torch', 'mmdet', 'Patches', 'ttt_linear', 'reference yes'):
        assert word in output
    # A terminal's screen.
    assert len(output.splitlines()) <= 30
    report.main(['--patches'])
    output = capsys.readouterr().out
    assert all(m.name in output and m.why in output for m in compat.patches())


def test_untried_versions_are_named_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, '_gpus', lambda: 'no GPU')
    monkeypatch.setattr(report, '_imported', lambda name: ('9.9.9', None))
    lines = report.versions()
    assert any('mmengine' in x and 'not tried yet; tried: 0.10' in x for x in lines)
    monkeypatch.setattr(report, 'packages_distributions', dict)
    monkeypatch.setattr(report, '_imported', lambda name: ('?', 'ModuleNotFoundError'))
    assert any(x.split() == ['mmseg', 'not', 'installed'] for x in report.versions())
