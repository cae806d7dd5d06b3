"""Image files are opened in one way: of a few formats, upright, of 8 bits, and no other program."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from PIL import Image

from mmvttt import pictures
from mmvttt.errors import DataError
from mmvttt.named_model import read_picture
from mmvttt.pictures import ImageError, LargeImageError, open_image, open_picture

EPS = b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n'


def class_folders(path: Path) -> object:
    pytest.importorskip('mmengine')
    from mmvttt.openmmlab.datasets.latents import ClassFolders

    return ClassFolders(path.parents[1], 32)[0]


def predicted(path: Path) -> object:
    pytest.importorskip('mmcv')
    from mmvttt.openmmlab.apis.predict import find_images

    return find_images([path])


READERS: dict[str, Callable[[Path], object]] = {
    'inspect, export': lambda path: read_picture(path, (32, 32)),
    'cache_latents': class_folders,
    'predict': predicted,
}


@pytest.mark.parametrize('reader', READERS)
def test_no_file_starts_another_program_or_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """Pillow hands an EPS to Ghostscript, whatever its name; a FIFO has no end."""
    (tmp_path / 'gs').write_text(f'#!/bin/sh\ntouch {tmp_path}/ran\n')
    (tmp_path / 'gs').chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    path = tmp_path / 'set/a/0.jpg'
    path.parent.mkdir(parents=True)
    path.write_bytes(EPS)
    with pytest.raises(ImageError):
        READERS[reader](path)
    assert not (tmp_path / 'ran').exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError):
        READERS[reader](path)


def test_a_small_file_of_many_pixels_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new('L', (100, 90)).save(tmp_path / 'a.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 4000)
    with pytest.raises(LargeImageError):
        open_picture(tmp_path / 'a.png')


@pytest.mark.parametrize(('factor', 'largest'), [(1, 0), (16, 15), (64, 62), (257, 250)])
def test_sixteen_bits(tmp_path: Path, factor: int, largest: int) -> None:
    """The upper 8 are read, as by OpenCV; it is said where hardly anything is left."""
    numbers = (np.arange(64 * 48).reshape(64, 48) % 251 * factor).astype(np.uint16)
    Image.fromarray(numbers).save(tmp_path / 'a.png')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        pixels = np.asarray(open_picture(tmp_path / 'a.png'))
    assert (pixels == (numbers // 256)[..., None]).all()
    assert [f'{largest} of 255' in str(w.message) for w in caught] == [True] * (factor < 257)


@pytest.mark.parametrize('kind', ['jp2', 'avif'])
def test_formats_that_opencv_reads(tmp_path: Path, kind: str) -> None:
    Image.new('RGB', (40, 30), (200, 30, 90)).save(tmp_path / f'a.{kind}')
    assert open_image(tmp_path / f'a.{kind}')[0].size == (40, 30)


def test_floating_point_numbers(tmp_path: Path) -> None:
    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / 'a.tif')
    with pytest.raises(ImageError):
        open_picture(tmp_path / 'a.tif')


def test_a_picture_of_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new('RGB', (4, 3)).save(tmp_path / 'a b.png')
    answers = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(('127.0.0.1', 0), answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        site = f'http://127.0.0.1:{server.server_port}'
        path = pictures.fetch_image(f'{site}/a%20b.png?size=4', tmp_path)
        assert Path(path).name == 'a_20b.png'
        assert pictures.open_image(path)[0].size == (4, 3)
        with pytest.raises(pictures.ImageError, match='404'):
            pictures.fetch_image(f'{site}/none.png', tmp_path)
        monkeypatch.setattr(pictures, '_BYTES', 10)
        with pytest.raises(pictures.ImageError, match='download it'):
            pictures.fetch_image(f'{site}/a%20b.png', tmp_path)
        server.shutdown()
