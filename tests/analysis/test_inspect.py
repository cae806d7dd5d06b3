"""tools/inspect_model.py on small models: files and numbers of every diagnostic, and bad input."""

import csv
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from mmvttt import by_name
from mmvttt.analysis.inspect import DIAGNOSTICS
from mmvttt.analysis.look import Look
from mmvttt.by_name import find_model, load_model
from mmvttt.named_model import read_picture

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
TOOL = 'inspect_model.py'


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """A config of a small Vittt, and an image."""
    (tmp_path / 'small.py').write_text(
        f"model = dict(type='mmvttt.Vittt', arch={ARCH!r}, img_size=64)\n"
    )
    pixels = np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / 'photo.png'), pixels)
    return tmp_path / 'small.py', tmp_path / 'photo.png'


COLUMNS = {
    'erf': ['map', 'side_20', 'side_50', 'side_99'],
    'gmm': ['layer', 'variation'],
    'loss': ['layer', 'first', 'last'],
    'state': ['layer', 'drift', 'rank', 'rate'],
    'attention': ['layer', 'distance', 'queries'],
    'keys': ['layer', 'key_shift', 'independent'],
}


@pytest.mark.parametrize('kind', ['Vittt', 'ViT3', 'T5'])
def test_every_diagnostic_draws_and_writes(
    kind: str, small: tuple, tmp_path: Path, tools: Any
) -> None:
    out = tmp_path / 'out'
    options = ('--cfg-options', f'model.type=mmvttt.{kind}', '--query', 0.5, 0.5, '--query', 0, 1)
    output = tools(TOOL, *small, '--shape', 64, 96, '--out', out, *options)
    # mmengine's list of all parameters.
    assert 'torch.Size' not in output
    for name in DIAGNOSTICS:
        table = rows(out / f'{name}.csv')
        assert list(table[0]) == COLUMNS[name]
        layers = ['backbone'] if name == 'erf' else ['blocks.0', 'blocks.1']
        assert [next(iter(row.values())) for row in table] == layers
        assert all(np.isfinite(float(v)) for row in table for v in list(row.values())[1:])
        pictures = list(out.glob(f'{name}*.png'))
        assert pictures
        assert all(f'wrote {picture}' in output for picture in pictures)
    assert {p.suffix for p in out.iterdir()} == {'.png', '.csv'}


def test_models_of_timm(small: tuple, tmp_path: Path, tools: Any, caplog) -> None:
    _, photo = small
    out = tmp_path / 'out'
    options = ('--shape', 64, 64, '--out', out, '--cfg-options', 'depth=2')
    options = (TOOL, 'vit_tiny_patch16_224', photo, *options, '--what')
    tools(*options, 'erf', 'attention', 'keys')
    assert [row['layer'] for row in rows(out / 'attention.csv')] == ['blocks.0', 'blocks.1']
    tools.error(*options, 'gmm')
    # A diagnostic that cannot draw does not end the others.
    with caplog.at_level('WARNING'):
        output = tools(*options, 'gmm', 'erf')
    assert f'wrote {out / "erf.png"}' in output
    assert 'gmm' in caplog.text


def test_pictures_are_read_upright(tmp_path: Path) -> None:
    picture = Image.effect_noise((8, 6), 50).convert('RGB')
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tmp_path / 'turned.png', exif=exif)
    expected = torch.from_numpy(np.rot90(picture, -1).copy()) / 255
    assert torch.equal(read_picture(tmp_path / 'turned.png', (8, 6)), expected.permute(2, 0, 1))


@pytest.mark.parametrize(
    ('preprocessor', 'expected'),
    [
        (dict(mean=[30.0, 20, 10], std=[2.0, 1, 1]), [-15.0, 60, 190]),
        (dict(mean=[30.0, 20, 10], std=[2.0, 1, 1], to_rgb=True), [85.0, 60, -10]),
        (dict(), [0.0, 80, 200]),
    ],
)
def test_a_model_gets_what_its_preprocessor_makes(
    preprocessor: dict, expected: list, tmp_path: Path
) -> None:
    backbone = dict(type='mmvttt.Vittt', arch=ARCH)
    model = dict(type='mmpretrain.ImageClassifier', backbone=backbone)
    model['data_preprocessor'] = preprocessor
    Config(dict(model=model, default_scope='mmpretrain')).dump(tmp_path / 'some.py')
    named = find_model(str(tmp_path / 'some.py'))
    picture = torch.tensor([200, 80, 0]).view(3, 1, 1).expand(3, 2, 2) / 255
    assert named.prepare(picture)[:, 1, 1].tolist() == expected


def test_a_model_of_timm_gets_its_own_statistics() -> None:
    named = find_model('vit_tiny_patch16_224', dict(depth=1))
    assert named.prepare(torch.ones(3, 2, 2)).unique().tolist() == [1.0]


def test_weights_of_timm_are_not_initialised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    named = find_model('vit_tiny_patch16_224', dict(depth=1))
    torch.nn.init.ones_(named.model.patch_embed.proj.weight)
    monkeypatch.setattr(by_name, 'find_model', lambda *_: named)
    assert load_model('vit_tiny_patch16_224').model.patch_embed.proj.weight.eq(1).all()


def test_images_of_one_name(tmp_path: Path) -> None:
    paths = [tmp_path / folder / 'a.png' for folder in ('1', '2')]
    look = Look(torch.nn.Identity(), paths, (8, 8), tmp_path, torch.nn.Identity())
    assert set(look.names.values()) == {'a_0', 'a_1'}
