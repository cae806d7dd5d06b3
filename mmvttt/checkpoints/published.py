"""The published weights by name: where they are, whose they are, and what they reach."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointMissingError, suggest
from .download import cache, download
from .file_kind import problem

SCHEME = 'mmvttt://'
_FOLDER = Path(__file__).with_name('weights')
_ADDRESS = 'https://cloud.tsinghua.edu.cn/f/{}/?dl=1'
_VIT3: Any = dict(authors='https://github.com/LeapLabTHU/ViTTT', licence='MIT')
# Its folder dittt has the licence of the DiT that it is built on.
_DIT3: Any = {**_VIT3, 'licence': 'CC-BY-NC-4.0'}
_T5: Any = dict(authors='https://github.com/LeapLabTHU/Transformer-to-TTT', licence='MIT')
# Without authors: they come with mmvttt.
_OURS: Any = dict(licence='Apache-2.0')


@dataclass(frozen=True)
class Published:
    """Published weights.

    Attributes:
        name: The name of the config that they are for (see also `start_of`).
        task: 'classification', 'detection', 'segmentation' or 'generation'.
        results: Results on the paper's data set, as the authors publish them.
        url: Address of the file, or '' where it comes with mmvttt.
        authors: The repository that publishes them, or '' for mmvttt's own.
        licence: The licence of the code there. None is stated for the weights.
        timm: The name and tag that timm knows them by, if it does.
        start_of: The config that starts from them, where none is for them.
        entry: The entry of the file that its authors' code starts from, if not the averaged one.
    """

    name: str
    task: str
    results: str
    url: str = ''
    authors: str = ''
    licence: str = ''
    timm: str = ''
    start_of: str = ''
    entry: str = ''


def _table() -> dict[str, Published]:
    classify, detect, segment = 'classification', 'detection', 'segmentation'
    rows = [
        Published(name, classify, results, _ADDRESS.format(file), timm=timm, **_VIT3)
        for name, file, results, timm in (
            ('vit3_t_in1k', 'e12d1bd1c20c4e06a2da', 'top-1 76.5', 'vit3_tiny_patch16_224.in1k'),
            ('vit3_s_in1k', '4ab59ca54b474dff9b70', 'top-1 81.6', 'vit3_small_patch16_224.in1k'),
            ('vit3_b_in1k', 'c9e9bb09f85d449ab8cf', 'top-1 82.6', 'vit3_base_patch16_224.in1k'),
            ('hvit3_t_mesa_in1k', 'f0c7c73ceabe49b7b161', 'top-1 84.0', 'h_vit3_tiny.mesa_in1k'),
            ('hvit3_s_mesa_in1k', '3eeab8621a7f43929a87', 'top-1 84.9', 'h_vit3_small.mesa_in1k'),
            ('hvit3_b_mesa_in1k', '1d0d7fb840254275b29d', 'top-1 85.5', 'h_vit3_base.mesa_in1k'),
        )
    ]
    rows += [
        Published(name, task, results, _ADDRESS.format(file), **_VIT3)
        for name, task, file, results in (
            ('maskrcnn_hvit3_t_1x', detect, 'a00315bbfd504edebfb0', 'box AP 47.3, mask AP 42.8'),
            ('maskrcnn_hvit3_s_1x', detect, 'b42d36b21a5e44d0b266', 'box AP 49.1, mask AP 44.1'),
            ('maskrcnn_hvit3_b_1x', detect, '4a641d087ca248e8804b', 'box AP 50.0, mask AP 44.6'),
            ('maskrcnn_hvit3_t_3x', detect, '8c39ef3d7d144a81b986', 'box AP 48.9, mask AP 44.0'),
            ('maskrcnn_hvit3_s_3x', detect, 'faa577d9a25140ef94d1', 'box AP 50.5, mask AP 45.0'),
            ('maskrcnn_hvit3_b_3x', detect, 'e9c1aef780d949489408', 'box AP 51.0, mask AP 45.3'),
            ('upernet_hvit3_t_160k', segment, 'df39e508ae5b49c59cca', 'mIoU 48.0'),
            ('upernet_hvit3_s_160k', segment, '71c786dd7e8046b5ab43', 'mIoU 50.2'),
            ('upernet_hvit3_b_160k', segment, '6bd6db157003462f9fed', 'mIoU 51.7'),
        )
    ]
    # Trained again by the authors: the weights behind the paper's figures were lost.
    rows += [
        Published(name, 'generation', results, _ADDRESS.format(file), **_DIT3)
        for name, file, results in (
            ('dit3_b2_in1k', 'c68d33055c6b44f39584', 'FID 39.44, IS 37.22'),
            ('dit3_b4_in1k', '49a2ea7a60624a8a94f3', 'FID 65.25, IS 22.28'),
            ('dit3_b8_in1k', 'd09682e5b50d40d48f4e', 'FID 120.82, IS 10.87'),
        )
    ]
    nano = 'vittt_nano_patch4_32.cifar10'
    deit, dit = _ADDRESS.format('8efdb83ccae8422bb0ad'), _ADDRESS.format('ce8c6a6f96dc4d17aa80')
    rows += [
        Published(
            'deit_t_in1k', classify, 'top-1 72.2', deit, start_of='t5_t_in1k_30e', **_T5
        ),
        Published(
            'dit_s2_in1k', 'generation', '', dit, start_of='dit5_s2_in1k_50k', entry='model',
            **_T5
        ),
        Published('cifar10_vit_nano', classify, 'top-1 64.2', **_OURS),
        Published('cifar10_vittt_nano', classify, 'top-1 81.0', timm=nano, **_OURS),
        Published('maskrcnn_vittt_nano_pedestrians', detect, 'box AP 55.0, mask AP 43.1', **_OURS),
    ]  # fmt: skip
    return {row.name: row for row in rows}


PUBLISHED = _table()
# Short names of shipped models.
SHORT_NAMES = {'pedestrians': 'maskrcnn_vittt_nano_pedestrians'}


def published(name: str) -> Published:
    """The row of `name` or `mmvttt://name`. Raises CheckpointMissingError if there is none."""
    short = name.removeprefix(SCHEME)
    short = SHORT_NAMES.get(short, short)
    if short not in PUBLISHED:
        raise CheckpointMissingError(
            f'there are no published weights {short!r}{suggest(short, PUBLISHED)}; there are '
            f'{", ".join(PUBLISHED)}. Give {SCHEME} and one of these names, or a file'
        )
    return PUBLISHED[short]


def published_file(name: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """The file of `mmvttt://NAME`, downloaded if it is not on this machine.

    It comes with mmvttt, lies in the folder MMVTTT_WEIGHTS, or is downloaded once from
    the mirror that MMVTTT_WEIGHTS names or from the authors' address; `say` gets its size and time.

    Raises:
        CheckpointMissingError: There are no such weights, or not in that folder.
        CheckpointError: They cannot be downloaded.
    """
    row = published(name)
    path, url = _where(row)
    if path.is_file():
        return path
    if not url:
        raise CheckpointMissingError(
            f'MMVTTT_WEIGHTS is a folder without {row.name}.pth and {row.name}.safetensors: put '
            f'the file of {row.url} there as {os.fspath(path)!r}'
        )
    download(url, path, problem, say)
    return path


def needs_download(name: str) -> bool:
    """Whether the file of `mmvttt://NAME` would be downloaded."""
    path, url = _where(published(name))
    return bool(url) and not path.is_file()


def name_at(url: str) -> str:
    """`mmvttt://NAME` of the weights at an address, with or without a fragment; '' for others."""
    names = (row.name for row in PUBLISHED.values() if row.url == url.partition('#')[0])
    return next((f'{SCHEME}{name}' for name in names), '')


def _where(row: Published) -> tuple[Path, str]:
    """Where the file of some weights is or will be, and the address to download it from or ''."""
    if not row.url:
        # `publish_checkpoint` puts the first digits of the hash behind the name.
        return next(_FOLDER.glob(f'{row.name}-????????.safetensors')), ''
    place = os.path.expanduser(os.environ.get('MMVTTT_WEIGHTS', ''))
    if place and '://' not in place:
        files = [Path(place, f'{row.name}{suffix}') for suffix in ('.pth', '.safetensors')]
        return next((file for file in files if file.is_file()), files[0]), ''
    mirror = f'{place.rstrip("/")}/{row.name}.pth' if place else ''
    return cache() / 'mmvttt' / f'{row.name}.pth', mirror or row.url


def listing() -> str:
    """A table of all published weights, with what of them is on this machine."""
    rows = [('name', 'task', "result, the publisher's", 'by', 'licence', 'here')]
    for row in PUBLISHED.values():
        path, _ = _where(row)
        here = f'{path.stat().st_size / 1e6:.1f} MB' if path.is_file() else 'no'
        result = row.results if not row.start_of else f'{row.results} start of {row.start_of}'
        by = row.authors.removeprefix('https://github.com/') or 'mmvttt'
        rows.append((row.name, row.task, result.strip(), by, row.licence, here))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ('  '.join(map(str.ljust, cells, widths)).rstrip() for cells in rows)
    return '\n'.join(lines)
