"""Files that ask for more than they hold: refused in milliseconds, before anything is built."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmvttt.errors import CheckpointError
from mmvttt.reliability.read import read_content

START = b'\x80\x02'


def name(module: str, attribute: str) -> bytes:
    return f'c{module}\n{attribute}\n'.encode()


def number(value: int) -> bytes:
    return b'J' + struct.pack('<i', value)


def text(value: str) -> bytes:
    return b'X' + struct.pack('<I', len(value)) + value.encode()


def storage(size: int) -> bytes:
    kind = name('torch', 'FloatStorage')
    return b'(' + text('storage') + kind + text('0') + text('cpu') + number(size) + b'tQ'


def tensor(stored: int, side: int, stride: int) -> bytes:
    shape = (number(side) + number(side) + b'\x86') + (number(stride) + number(stride) + b'\x86')
    rest = b'\x89' + name('collections', 'OrderedDict') + b')RtR'
    build = name('torch._utils', '_rebuild_tensor_v2')
    return b'}' + text('w') + build + b'(' + storage(stored) + number(0) + shape + rest + b's'


def called(module: str, attribute: str) -> bytes:
    return name(module, attribute) + number(2_000_000_000) + b'\x85R'


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


def legacy() -> bytes:
    buffer = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {'little_endian': True}):
        pickle.dump(part, buffer, 2)
    pid = name('torch', 'FloatStorage') + text('0') + text('cpu') + number(900_000_000)
    buffer.write(START + b'(' + text('storage') + pid + b'NtQ.')
    return buffer.getvalue()


def doubled() -> bytes:
    steps = (b'q' + bytes([n]) + b'h' + bytes([n]) + b'\x86' for n in range(60))
    return archive(b'}K\x01\x85' + b''.join(steps) + b'K\x01s')


FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    # A segmentation fault: the key of a dict is hashed by recursion.
    'nested': (lambda: archive(b'})' + b'\x85' * 3_000_000 + b'K\x01s'), 'more than 100 deep'),
    'doubled': (doubled, 'repeats its values'),
    'bytearray': (lambda: archive(called('builtins', 'bytearray')), 'asks for a bytearray'),
    'storage': (lambda: archive(called('torch.storage', 'UntypedStorage')), 'UntypedStorage'),
    'class': (lambda: archive(called('torch', 'FloatTensor')), 'asks for a FloatTensor'),
    'stride 0': (lambda: archive(tensor(1, 27_000, 0), data__0=bytes(4)), 'many times its size'),
    'numel': (lambda: archive(tensor(99, 3, 1), data__0=bytes(8)), 'has 99 numbers: it has fewer'),
    'bomb': (
        lambda: archive(b'}', zipfile.ZIP_DEFLATED, data__0=bytes(10_000_000)),
        'has compressed parts',
    ),
    'overlap': (overlapping, 'parts lie on one another'),
    'legacy': (legacy, 'has 900000000 numbers'),
}


@pytest.mark.parametrize('kind', FILES)
@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_what_asks_for_too_much_is_refused(kind: str, tmp_path: Path) -> None:
    make, message = FILES[kind]
    path = tmp_path / 'a.pth'
    path.write_bytes(make())
    for content in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(CheckpointError, match=message):
            read_content(content)


@pytest.mark.parametrize('new', [True, False], ids=['zip', 'before 1.6'])
def test_honest_files_are_within_bounds(new: bool, tmp_path: Path) -> None:
    shared = torch.ones(1000)
    content = {
        'tied': [shared, shared, shared[:10], shared.view(10, 100).t()],
        'expanded': torch.ones(1).expand(1000),
        'empty': torch.empty(0, 3),
        'types': [torch.ones(3, dtype=d) for d in (torch.bool, torch.bfloat16, torch.complex64)],
        'parameter': torch.nn.Parameter(torch.ones(2)),
        'nested': {(1, (2, 3)): [{'a': ()}]},
    }
    torch.save(content, tmp_path / 'a.pth', _use_new_zipfile_serialization=new)
    read = read_content(tmp_path / 'a.pth')
    assert read.keys() == content.keys()
    assert read['expanded'].shape == (1000,)
    assert read['nested'] == content['nested']


def test_nothing_stays_on_torch_s_list(tmp_path: Path) -> None:
    torch.save({}, tmp_path / 'a.pth')
    before = set(torch.serialization.get_safe_globals())
    read_content(tmp_path / 'a.pth')
    assert set(torch.serialization.get_safe_globals()) == before


def test_two_hosts_may_have_a_file_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path))

    def download(url: str, path: str, digest: str | None) -> None:
        torch.save({'url': torch.tensor(len(url))}, path)

    monkeypatch.setattr(torch.hub, 'download_url_to_file', download)
    urls = ('https://a/epoch_12.pth', 'https://other/epoch_12.pth', 'https://x/..')
    assert [int(read_content(u)['url']) for u in urls] == [len(u) for u in urls]
