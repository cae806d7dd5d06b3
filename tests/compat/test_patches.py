"""Patches run once, say what they did, and `python -m mmvttt` prints it."""

import subprocess
import sys

import pytest

from mmvttt import __main__ as report
from mmvttt import compat
from mmvttt.compat import patch


def test_every_patch_ran_once_and_has_a_reason() -> None:
    before = compat.patches()
    compat.setup()
    assert compat.patches() == before
    assert len({m.name for m in before}) == len(before)
    assert all(m.why and m.unneeded != '' for m in before)


def test_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(patch, '_REPAIRS', [])
    monkeypatch.setattr(patch, '_DONE', {})

    @patch.patch('broken', 'it was broken')
    def repair() -> None:
        calls.append(1)

    @patch.patch('whole', 'it may break')
    def leave() -> str:
        return 'it is whole'

    patch.run_all()
    patch.run_all()
    assert calls == [1]
    broken, whole = patch.patches()
    assert broken.applied
    assert not whole.applied
    assert whole.unneeded == 'it is whole'


def test_report() -> None:
    run = subprocess.run(
        [sys.executable, '-m', 'mmvttt'], capture_output=True, text=True, check=True
    )
    for word in ('torch', 'mmdet', 'Patches', *(m.name for m in compat.patches()), 'ttt_linear'):
        assert word in run.stdout
    assert 'reference  yes' in run.stdout


def test_versions_nobody_tried_are_named_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, '_installed', lambda names: (names[0], '9.9.9'))
    lines = report.versions()
    assert any('mmengine' in x and 'not tried yet; tried: 0.10' in x for x in lines)
    monkeypatch.setattr(report, '_installed', lambda names: None)
    assert any(x.split() == ['mmseg', 'not', 'installed'] for x in report.versions())
