"""Files that are whole, or not there."""

import os
from pathlib import Path

import pytest
from mmengine.fileio import LocalBackend

from mmvttt.reliability.atomic_write import write_whole


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'a.pth'
    write_whole(path, b'old')

    def fail(*_: object) -> None:
        raise OSError('disk full')

    monkeypatch.setattr(os, 'replace', fail)
    with pytest.raises(OSError, match='disk full'):
        write_whole(path, b'new')
    assert path.read_bytes() == b'old'
    assert [p.name for p in tmp_path.iterdir()] == ['a.pth']


def test_mmengine_writes_whole_files(tmp_path: Path) -> None:
    target = tmp_path / 'folder' / 'b.pth'
    LocalBackend().put(b'one', target)
    link = tmp_path / 'link.pth'
    link.symlink_to(target)
    LocalBackend().put(b'two', str(link))
    assert not link.is_symlink()
    assert link.read_bytes() == b'two'
    assert target.read_bytes() != b'two'
    LocalBackend().put_text('ä', tmp_path / 'c.txt', encoding='latin-1')
    assert (tmp_path / 'c.txt').read_bytes() == b'\xe4'


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / 'plain'
    plain.write_bytes(b'')
    write_whole(tmp_path / 'whole', b'')
    assert (tmp_path / 'whole').stat().st_mode == plain.stat().st_mode
