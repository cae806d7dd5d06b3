"""Downloads: once, resumed, whole, compared; and errors that say what to do."""

import gzip
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmvttt.checkpoints import download
from mmvttt.checkpoints.published import published_file
from mmvttt.checkpoints.read import read_content
from mmvttt.checkpoints.sources import without_password
from mmvttt.errors import CheckpointError, RefusedCheckpointError

from .file_server import Share, serve
from .pickles import Reduced, saved

NAME = 'vit3_t_in1k'


SMALL = saved({'a': torch.arange(5000)})


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Share]:
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(download.time, 'sleep', lambda _: None)
    with serve(Share({f'{NAME}.pth': SMALL, 'a.pth': SMALL})) as share:
        monkeypatch.setenv('MMVTTT_WEIGHTS', f'{share.address}/f/')
        yield share


def files(folder: Path) -> list[str]:
    found = (p.name for p in folder.rglob('*') if p.is_file())
    return sorted(name for name in found if not name.endswith('.lock'))


def test_a_published_file_is_downloaded_once(
    share: Share, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, '_FIRST_SECONDS', 0)
    lines: list[str] = []
    for _ in range(2):
        published_file(NAME, lines.append)
        assert len(read_content(f'mmvttt://{NAME}')['a']) == 5000
    assert [line.partition(' MB')[0] for line in lines] == [f'{len(SMALL) / 1e6:.3g}', lines[1]]
    assert 'minutes' in lines[1]
    assert [path for path, _ in share.requests] == [f'/f/{NAME}.pth', f'/files/{NAME}.pth']
    assert files(tmp_path) == [f'.{NAME}.pth.sha256', f'{NAME}.pth']


@pytest.mark.parametrize('seafile', [False, True])
def test_a_transfer_goes_on_where_it_broke(share: Share, tmp_path: Path, seafile: bool) -> None:
    """Tries count only while nothing comes; a later process sends the rest only."""
    share.cuts = [10_000, 10_000, 20_000, 20_000, 25_000, 25_000, 30_000, *[30_000] * 4]
    share.seafile, url = seafile, f'{share.address}/files/a.pth'
    with pytest.raises(CheckpointError, match='30000'):
        read_content(url)
    assert len(files(tmp_path)) == 1
    share.cuts = []
    assert len(read_content(url)['a']) == 5000
    ranges = [ranged for _, ranged in share.requests if ranged]
    assert ranges[:4] == [f'bytes={n}-' for n in (10_000, 20_000, 25_000, 30_000)]
    assert ranges[-1] == 'bytes=30000-'
    # The part is gone.
    assert files(tmp_path) == ['.a.pth.sha256', 'a.pth']


@pytest.mark.parametrize('fault', ['shifted', 'without_length', 'busy'])
def test_faults_of_servers(share: Share, tmp_path: Path, fault: str) -> None:
    """A part from another byte is not appended; a busy server is asked again."""
    share.cuts, url = [10_000], f'{share.address}/files/a.pth'
    if fault == 'busy':
        share.busy = [429, 503, 429]
        with pytest.raises(CheckpointError, match='429'):
            read_content(url)
        share.busy = [429]
    else:
        setattr(share, fault, 500)
    if fault == 'without_length':
        # Nothing tells that it is cut off, but for the file itself.
        with pytest.raises(CheckpointError, match='not kept'):
            read_content(url)
        assert files(tmp_path) == []
    assert len(read_content(url)['a']) == 5000
    assert files(tmp_path) == ['.a.pth.sha256', 'a.pth']


def test_a_stop_keeps_what_has_come(tmp_path: Path) -> None:
    pieces, part = iter([b'x' * 10]), tmp_path / '.a.pth.1.100.2.partial'

    def read1(_: int) -> bytes:
        if piece := next(pieces, None):
            return piece
        raise KeyboardInterrupt

    answer: Any = SimpleNamespace(headers={'Content-Length': '100'}, read1=read1)
    with pytest.raises(KeyboardInterrupt):
        download._written(answer, part, 0, print)
    assert part.read_bytes() == b'x' * 10


def test_two_sites_may_have_a_file_of_one_name(share: Share) -> None:
    assert len(read_content(f'{share.address}/x/a.pth')['a']) == 5000
    share.files['a.pth'] = saved({'a': torch.arange(3)})
    assert len(read_content(f'{share.address}/y/a.pth')['a']) == 3


def test_what_is_downloaded_runs_nothing(share: Share, tmp_path: Path) -> None:
    """mmengine's own loader unpickles what comes from a URL."""
    share.files['evil.pth'] = saved(Reduced(os.mkdir, str(tmp_path / 'ran')))
    readers = [read_content]
    if find_spec('mmengine'):
        from mmengine.runner.checkpoint import _load_checkpoint

        assert len(_load_checkpoint(f'{share.address}/x/a.pth')['a']) == 5000
        readers.append(_load_checkpoint)
    for read in readers:
        with pytest.raises(RefusedCheckpointError):
            read(f'{share.address}/x/evil.pth')
    assert not (tmp_path / 'ran').exists()


@pytest.mark.skipif(not find_spec('mmengine'), reason='a training')
def test_the_password_of_a_url_is_not_shown(
    share: Share, tmp_path: Path, run: Callable, capfd: pytest.CaptureFixture
) -> None:
    url = share.address.replace('//', '//me:secret@') + '/x/private.pth'
    with pytest.raises(CheckpointError, match='404') as caught:
        read_content(url)
    import tiny

    share.files['private.pth'] = saved({'state_dict': tiny.TinyModel().state_dict()})
    # A function that logs its argument gets the file.
    file = without_password(url)
    assert 'state_dict' in read_content(file)
    assert 'secret' not in f'{caught.value}{file}'
    assert without_password(share.address) == share.address
    init = {'load_from': url, 'tta_model.init_cfg': [dict(type='Pretrained', checkpoint=url)]}
    run('train', cfg_options={**init, 'train_cfg.max_epochs': 1}, work_dir='run')
    run('evaluate', url, work_dir='run')
    written = [path.read_bytes() for path in (tmp_path / 'run').rglob('*') if path.is_file()]
    assert len(written) > 3
    assert not any(b'secret' in content for content in written)
    assert 'secret' not in ''.join(capfd.readouterr())


def test_another_version_is_not_appended(share: Share, tmp_path: Path) -> None:
    share.cuts = [10_000, 0, 0, 0, 0]
    url = f'{share.address}/files/a.pth'
    with pytest.raises(CheckpointError):
        read_content(url)
    share.files['a.pth'], share.cuts = saved({'a': torch.arange(4000)}), []
    assert len(read_content(url)['a']) == 4000


def test_a_planted_link_is_not_followed(share: Share, tmp_path: Path) -> None:
    share.cuts = [10_000, 0, 0, 0, 0]
    url, victim = f'{share.address}/files/a.pth', tmp_path / 'victim'
    with pytest.raises(CheckpointError):
        read_content(url)
    (partial,) = tmp_path.rglob('*.partial')
    for plant in (os.symlink, os.link):
        victim.write_bytes(b'v' * 10_000)
        partial.unlink(missing_ok=True)
        plant(victim, partial)
        share.cuts = []
        assert len(read_content(url)['a']) == 5000
        assert victim.read_bytes() == b'v' * 10_000
        next(tmp_path.rglob('a.pth')).unlink()


def test_what_is_not_the_file_is_said(share: Share, tmp_path: Path) -> None:
    share.files['a-0123456f.pth'] = SMALL
    share.files.pop(f'{NAME}.pth')
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, 'w') as archive:
        archive.writestr('a/page.html', '<html>')
    bodies = {
        'a web page': b'\n<!DOCTYPE html><html>Sign in</html>',
        'a web page ': b'\xef\xbb\xbf<!-- a -->\n<!-- b --><html>',
        'JSON': b'{"error": "no such share"}',
        'not a file of torch': b'Too many requests',
        'Git LFS': b'version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n',
        'empty': b'',
        'gzip': gzip.compress(SMALL),
        'without the data of torch': zipped.getvalue(),
        'damaged': (8).to_bytes(8, 'little') + b'{"a": 1}',
    }
    for kind, body in bodies.items():
        share.files['body.pth'] = body
        with pytest.raises(CheckpointError, match=kind.strip()) as caught:
            read_content(f'{share.address}/files/body.pth')
        # The network is not at fault.
        assert 'network' not in str(caught.value)
    pages = (f'{share.address}/files/{name}.pth' for name in ('a-0123456f', 'none'))
    for source in (*pages, f'mmvttt://{NAME}', 'mmvttt://vit4'):
        with pytest.raises(CheckpointError):
            read_content(source)
    assert files(tmp_path) == []


def test_a_file_of_the_users_own_is_taken(
    share: Share, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was put in the place of a download, and a network that is not to be asked."""
    read_content(f'mmvttt://{NAME}')
    published_file(NAME).write_bytes(saved({'a': torch.arange(7)}))
    for _ in range(2):
        assert len(read_content(f'mmvttt://{NAME}')['a']) == 7
    assert caplog.text.count('is not the file that was downloaded') == 1
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    requests = len(share.requests)
    with pytest.raises(CheckpointError, match='HF_HUB_OFFLINE'):
        read_content(f'{share.address}/files/a.pth')
    assert len(share.requests) == requests


@pytest.mark.parametrize('character', ['/', '?', '#'])
def test_a_password_that_ends_the_host_is_not_shown(character: str) -> None:
    url = f'https://me:sec{character}ret@host/a.pth'
    with pytest.raises(CheckpointError, match='%2F') as caught:
        read_content(url)
    assert 'sec' not in str(caught.value)
    assert 'ret' not in str(caught.value)


def test_the_digest_is_compared_at_each_load(share: Share, tmp_path: Path) -> None:
    """Of what was downloaded, and of a file whose name has one, such as the shipped ones."""
    read_content(f'mmvttt://{NAME}')
    shipped = published_file('cifar10_vittt_nano')
    copy = tmp_path / shipped.name
    for path, original in ((published_file(NAME), SMALL), (copy, shipped.read_bytes())):
        if not path.exists():
            path.write_bytes(original)
        written = path.stat().st_mtime_ns
        read_content(path)
        for at in range(len(original) // 10, len(original), len(original) // 5):
            path.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
            # As a disk damages a file, which nobody has written.
            os.utime(path, ns=(written, written))
            with pytest.raises(CheckpointError):
                read_content(path)


def test_a_full_disk_and_a_cache_for_reading(
    share: Share, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    for number in (28, 30):

        def fails(_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, 'fsync', fails)
        with pytest.raises(CheckpointError):
            read_content(f'mmvttt://{NAME}')
    monkeypatch.setattr(os, 'fsync', real)
    read_content(f'mmvttt://{NAME}')
    # What is there is read without a lock, and without writing.
    monkeypatch.setattr(download, 'locked', None)
    read_content(f'mmvttt://{NAME}')


def test_processes_download_once(share: Share) -> None:
    code = (
        f'import sys; from mmvttt.checkpoints.sources import find_source as f; f("mmvttt://{NAME}")'
    )
    started = [subprocess.Popen([sys.executable, '-c', code]) for _ in range(3)]
    assert [process.wait(timeout=300) for process in started] == [0] * 3
    assert [path for path, _ in share.requests].count(f'/files/{NAME}.pth') == 1
