"""Mends run once, say what they did, and `python -m mmvttt` prints it."""

import subprocess
import sys

import pytest

from mmvttt import __main__ as report
from mmvttt import compat
from mmvttt.compat import mend


def test_every_mend_ran_once_and_has_a_reason() -> None:
    before = compat.mends()
    compat.setup()
    assert compat.mends() == before
    assert len({m.name for m in before}) == len(before)
    assert all(m.why and m.unneeded != '' for m in before)


def test_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(mend, '_REPAIRS', [])
    monkeypatch.setattr(mend, '_DONE', {})

    @mend.mend('broken', 'it was broken')
    def repair() -> None:
        calls.append(1)

    @mend.mend('whole', 'it may break')
    def leave() -> str:
        return 'it is whole'

    mend.run_all()
    mend.run_all()
    assert calls == [1]
    broken, whole = mend.mends()
    assert broken.applied
    assert not whole.applied
    assert whole.unneeded == 'it is whole'


def test_report() -> None:
    run = subprocess.run(
        [sys.executable, '-m', 'mmvttt'], capture_output=True, text=True, check=True
    )
    for word in ('torch', 'mmdet', 'Mends', *(m.name for m in compat.mends()), 'ttt_linear'):
        assert word in run.stdout
    assert 'reference  yes' in run.stdout


def test_versions_nobody_tried_are_named_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, '_installed', lambda names: (names[0], '9.9.9'))
    lines = report.versions()
    assert any('mmengine' in x and 'not tried yet; tried: 0.10' in x for x in lines)
    monkeypatch.setattr(report, '_installed', lambda names: None)
    assert any(x.split() == ['mmseg', 'not', 'installed'] for x in report.versions())
