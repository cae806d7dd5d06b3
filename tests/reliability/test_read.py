"""Archives with odd parts are refused before anything is built; downloads are whole or not kept."""

import importlib
import io
import os
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from mmengine.runner.checkpoint import _load_checkpoint

from mmvttt.checkpoints.read import read_content
from mmvttt.checkpoints.sources import without_password
from mmvttt.errors import CheckpointError
from mmvttt.openmmlab.apis.evaluate import evaluate
from mmvttt.openmmlab.apis.train import train

from .test_allow_list import Reduced


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


SMALL = saved({'a': 1})
START = b'\x80\x02'


def archive(content: bytes, compression: int = zipfile.ZIP_STORED, **parts: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w', compression) as file:
        file.writestr('a/data.pkl', START + content + b'.')
        for part, data in {'version': b'3\n', **parts}.items():
            file.writestr(f'a/{part.replace("__", "/")}', data)
    return buffer.getvalue()


def overlapping() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as file:
        file.writestr('a/data.pkl', START + b'}.')
        file.writestr('a/data/0', bytes(100_000))
        file.filelist += [file.getinfo('a/data/0')] * 10_000
    return buffer.getvalue()


@pytest.mark.parametrize(
    ('file', 'message'),
    [
        (archive(b'}', zipfile.ZIP_DEFLATED, data__0=bytes(10_000_000)), 'has compressed parts'),
        (overlapping(), 'parts lie on one another'),
    ],
)
def test_what_asks_for_too_much_is_refused(file: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_content(io.BytesIO(file))


def test_nothing_stays_on_torch_s_list(tmp_path: Path) -> None:
    torch.save({}, tmp_path / 'a.pth')
    before = set(torch.serialization.get_safe_globals())
    read_content(tmp_path / 'a.pth')
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[bytes]]]:
    """The address of a server, and the answers that it gives; the first may be cut off."""
    answers: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not answers:
                self.send_error(404)
                return
            answer = answers.pop(0)
            self.send_response(200)
            self.send_header('Content-Length', str(max(len(SMALL), len(answer))))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path))
    with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as http:
        thread = Thread(target=http.serve_forever)
        thread.start()
        yield f'http://127.0.0.1:{http.server_port}', answers
        http.shutdown()
        thread.join()


def test_two_sites_may_have_a_file_of_one_name(server: tuple) -> None:
    address, answers = server
    answers += [SMALL, saved({'a': 2})]
    assert [read_content(f'{address}/{s}/epoch_12.pth')['a'] for s in 'xy'] == [1, 2]


def test_what_is_downloaded_runs_nothing(server: tuple, tmp_path: Path) -> None:
    """mmengine's own loader unpickles what comes from a URL."""
    address, answers = server
    evil = saved(Reduced(os.mkdir, str(tmp_path / 'ran')))
    answers += [SMALL, evil, evil]
    assert _load_checkpoint(f'{address}/good.pth') == {'a': 1}
    for number, read in enumerate((_load_checkpoint, read_content)):
        with pytest.raises(CheckpointError):
            read(f'{address}/evil_{number}.pth')
    assert not (tmp_path / 'ran').exists()


def test_the_password_of_a_url_is_not_shown(server: tuple) -> None:
    address, answers = server
    url = address.replace('//', '//me:secret@') + '/private.pth'
    with pytest.raises(CheckpointError) as caught:
        read_content(url)
    answers += [SMALL]
    assert read_content(url) == {'a': 1}
    # A function that logs its argument gets the file.
    file = without_password(url)
    assert read_content(file) == {'a': 1}
    assert 'secret' not in f'{caught.value}{file}'
    assert without_password(address) == address


def test_the_password_of_a_url_is_not_logged(
    server: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    address, answers = server
    folder = Path(__file__).parents[1] / 'trainings'
    monkeypatch.syspath_prepend(folder)
    tiny = importlib.import_module('tiny')
    answers += [saved({'state_dict': tiny.TinyModel().state_dict()})]
    url = address.replace('//', '//me:secret@') + '/private.pth'
    init = {'load_from': url, 'tta_model.init_cfg': [dict(type='Pretrained', checkpoint=url)]}
    options = dict(cfg_options={**init, 'train_cfg.max_epochs': 1}, work_dir=str(tmp_path / 'run'))
    train(folder / 'tiny_config.py', **options)
    evaluate(folder / 'tiny_config.py', url, work_dir=str(tmp_path / 'run'))
    written = [path.read_bytes() for path in (tmp_path / 'run').rglob('*') if path.is_file()]
    assert len(written) > 3
    assert not any(b'secret' in content for content in written)
    assert 'secret' not in ''.join(capfd.readouterr())
