"""The published weights by name: where they are, whose they are, and what they reach."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointMissingError, suggest

SCHEME = 'mmvttt://'
_FOLDER = Path(__file__).with_name('weights')
_ADDRESS = 'https://cloud.tsinghua.edu.cn/f/{}/?dl=1'
_VIT3: Any = dict(authors='https://github.com/LeapLabTHU/ViTTT', licence='MIT')
# Its folder dittt has the licence of the DiT that it is built on.
_DIT3: Any = {**_VIT3, 'licence': 'CC-BY-NC-4.0', 'layout': 'DiT'}
_T5: Any = dict(authors='https://github.com/LeapLabTHU/Transformer-to-TTT', licence='MIT')
# Without authors: they come with mmvttt.
_OURS: Any = dict(licence='Apache-2.0', layout='mmvttt')


@dataclass(frozen=True)
class Published:
    """Published weights.

    Attributes:
        name: The name of the config that they are for; see also `start_of`.
        task: 'classification', 'detection', 'segmentation' or 'generation'.
        results: Results on the paper's data set, as the authors publish them.
        url: Address of the file; '' where it comes with mmvttt.
        authors: The repository that publishes them; '' for mmvttt's own.
        licence: The licence of the code there; none is stated for the weights.
        layout: Whose names the tensors have: 'mmvttt', 'ViT³', 'DiT' or 'DeiT'.
        start_of: The config that starts from them, where none is for them.
        sha256, size: Digest and number of bytes of the file, where somebody has seen it.
    """

    name: str
    task: str
    results: str
    url: str = ''
    authors: str = ''
    licence: str = ''
    layout: str = 'ViT³'
    start_of: str = ''
    sha256: str = ''
    size: int = 0


def _table() -> dict[str, Published]:
    classify, detect, segment = 'classification', 'detection', 'segmentation'
    rows = [
        Published(name, task, results, _ADDRESS.format(file), **_VIT3)
        for name, task, file, results in (
            ('vit3_t_in1k', classify, 'e12d1bd1c20c4e06a2da', 'top-1 76.5'),
            ('vit3_s_in1k', classify, '4ab59ca54b474dff9b70', 'top-1 81.6'),
            ('vit3_b_in1k', classify, 'c9e9bb09f85d449ab8cf', 'top-1 82.6'),
            ('hvit3_t_mesa_in1k', classify, 'f0c7c73ceabe49b7b161', 'top-1 84.0'),
            ('hvit3_s_mesa_in1k', classify, '3eeab8621a7f43929a87', 'top-1 84.9'),
            ('hvit3_b_mesa_in1k', classify, '1d0d7fb840254275b29d', 'top-1 85.5'),
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
    deit, dit = _ADDRESS.format('8efdb83ccae8422bb0ad'), _ADDRESS.format('ce8c6a6f96dc4d17aa80')
    rows += [
        Published(
            'deit_t_in1k', classify, 'top-1 72.2', deit,
            layout='DeiT', start_of='t5_t_in1k_30e', **_T5,
        ),
        Published(
            'dit_s2_in1k', 'generation', '', dit,
            layout='DiT', start_of='dit5_s2_in1k_50k', **_T5,
        ),
        Published('cifar10_vit_nano', classify, 'top-1 64.2', **_OURS),
        Published('cifar10_vittt_nano', classify, 'top-1 81.0', **_OURS),
        Published('maskrcnn_vittt_nano_pedestrians', detect, 'box AP 57.7, mask AP 44.3', **_OURS),
    ]  # fmt: skip
    return {row.name: row for row in rows}


PUBLISHED = _table()


def published(name: str) -> Published:
    """The row of `name` or `mmvttt://name`; else a CheckpointMissingError."""
    short = name.removeprefix(SCHEME)
    if short not in PUBLISHED:
        raise CheckpointMissingError(
            f'there are no published weights {short!r}{suggest(short, PUBLISHED)}; there are '
            f'{", ".join(PUBLISHED)}. Give {SCHEME} and one of these names, or a file'
        )
    return PUBLISHED[short]


def local_file(row: Published) -> Path | None:
    """The file of published weights on this machine, or None if it has to be downloaded.

    Looks among the files that come with mmvttt, then in the folder MMVTTT_WEIGHTS, else in the
    cache of downloads.
    """
    if not row.url:
        # `publish_checkpoint` puts the first digits of the hash behind the name.
        return next(_FOLDER.glob(f'{row.name}-????????.safetensors'))
    place = _place()
    if '://' in place:
        return None
    files = (Path(place, f'{row.name}{suffix}') for suffix in ('.pth', '.safetensors'))
    file = next((file for file in files if file.is_file()), None)
    if place and file is None:
        raise CheckpointMissingError(
            f'MMVTTT_WEIGHTS names {place!r}, where there is neither {row.name}.pth nor '
            f'{row.name}.safetensors: put the file of {row.url} there'
        )
    return file if place else None


def address(row: Published) -> str:
    """The address to download from: the authors', or the mirror that MMVTTT_WEIGHTS names."""
    place = _place()
    return f'{place.rstrip("/")}/{row.name}.pth' if '://' in place else row.url


def _place() -> str:
    """A folder of the files, the address of a mirror, or ''."""
    return os.path.expanduser(os.environ.get('MMVTTT_WEIGHTS', ''))
