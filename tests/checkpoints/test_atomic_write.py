"""A file that replaces another is on the disk before it has its name, and its name after that."""

import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from mmvttt.checkpoints import atomic_write
from mmvttt.checkpoints.atomic_write import write_whole


def test_content_then_name_then_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    replace, fsync = os.replace, os.fsync

    def flushed(file: int) -> None:
        order.append('folder' if stat.S_ISDIR(os.fstat(file).st_mode) else 'content')
        fsync(file)

    def renamed(*paths: Path) -> None:
        order.append('name')
        replace(*paths)

    monkeypatch.setattr(os, 'fsync', flushed)
    monkeypatch.setattr(os, 'replace', renamed)
    write_whole(tmp_path / 'a', b'1')
    assert order == ['content', 'name', 'folder']


@pytest.mark.skipif(not hasattr(os, 'O_NOFOLLOW'), reason='this system has no O_NOFOLLOW')
def test_a_link_planted_meanwhile_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, planted = tmp_path / 'target', tmp_path / 'planted'
    target.write_bytes(b'mine')
    planted.symlink_to(target)
    monkeypatch.setattr(atomic_write, 'replacing', lambda path: nullcontext(planted))
    with pytest.raises(OSError, match='symbolic links'):
        atomic_write.write_whole(tmp_path / 'file', b'theirs')
    assert target.read_bytes() == b'mine'
