"""Caches of latents: what is in them, stops, and what is wrong with them."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip('mmengine')
from mmvttt.errors import DataError, MissingDataError, OptionError, UsageError
from mmvttt.openmmlab.datasets import latents as module
from mmvttt.openmmlab.datasets.digit_images import TinyDigits
from mmvttt.openmmlab.datasets.latents import CachedLatents, ClassFolders, cache_latents

from .small import small_vae

pytest.importorskip('diffusers')
from diffusers import AutoencoderKL


@pytest.fixture(scope='module')
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven images of two classes, of awkward sizes."""
    root = tmp_path_factory.mktemp('images')
    rng = np.random.default_rng(0)
    for i, size in enumerate([(31, 40), (33, 31), (50, 31)] * 2 + [(32, 32)]):
        folder = root / ('cat' if i < 3 else 'dog')
        folder.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / f'{i}.png')
    return root


@pytest.fixture(scope='module')
def vae() -> AutoencoderKL:
    return small_vae(shift_factor=0.1)


@pytest.fixture(scope='module')
def cache(images: Path, vae: AutoencoderKL, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('cache')
    return cache_latents(vae, ClassFolders(images, 32), folder, 2, dtype='float32')


def test_cache_is_what_the_autoencoder_says(images: Path, vae: AutoencoderKL, cache: Path) -> None:
    data, source = CachedLatents(cache), ClassFolders(images, 32)
    assert len(data) == 7
    for index in (0, 6):
        pixels, label = source[index]
        assert pixels.shape == (3, 32, 32)
        torch.manual_seed(index)
        item = data[index]
        torch.manual_seed(index)
        mirrored = bool(torch.rand(()) < 0.5)
        with torch.no_grad():
            gaussian = vae.encode((pixels.flip(-1) if mirrored else pixels)[None]).latent_dist
        drawn = gaussian.mean[0] + gaussian.std[0] * torch.randn(4, 16, 16)
        expected = (drawn - 0.1) * vae.config.scaling_factor
        # fp32, another size of batch.
        torch.testing.assert_close(item['latents'], expected, rtol=1e-4, atol=1e-5)
        assert item['class_labels'] == label == (index >= 3)


def test_half_of_the_images_are_mirrored(cache: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(cache, tmp_path / 'cache')
    array = np.zeros((7, 2, 8, 2, 2), np.float32)
    array[:, 1, :4] = 1
    np.save(folder / 'moments.npy', array)
    data = CachedLatents(folder)
    torch.manual_seed(0)
    mirrored = [data[0]['latents'].mean().item() > 0 for _ in range(400)]
    # Three standard errors.
    assert np.mean(mirrored) == pytest.approx(0.5, abs=0.075)
    data.flip = False
    assert data[0]['latents'].mean() < 0


def test_a_stopped_cache_is_none(images: Path, vae: AutoencoderKL, tmp_path: Path) -> None:
    class Stopped(ClassFolders):
        def __getitem__(self, index: int):
            if index == 5:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        cache_latents(vae, Stopped(images, 32), tmp_path, 2, dtype='float32')
    with pytest.raises(MissingDataError):
        CachedLatents(tmp_path)
    cache_latents(vae, ClassFolders(images, 32), tmp_path, 4, dtype='float32')
    assert len(CachedLatents(tmp_path)) == 7


def test_prompts_come_along(cache: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(cache, tmp_path / 'cache')
    (folder / 'class_labels.npy').unlink()
    np.save(folder / 'encoder_hidden_states.npy', np.ones((7, 5, 12), np.float16))
    np.save(folder / 'pooled_projections.npy', np.ones((7, 9), np.float16))
    item = CachedLatents(folder)[2]
    assert {n: tuple(v.shape) for n, v in item.items()} == dict(
        latents=(4, 16, 16), encoder_hidden_states=(5, 12), pooled_projections=(9,)
    )
    assert {v.dtype for v in item.values()} == {torch.float32}
    pooled = CachedLatents(folder, conditions=['pooled_projections'])
    assert set(pooled[2]) == {'latents', 'pooled_projections'}
    with pytest.raises(DataError):
        CachedLatents(folder, conditions=['class_labels'])


def test_what_is_wrong_with_a_cache(
    images: Path, vae: AutoencoderKL, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError):
        cache_latents(vae, ClassFolders(images, 16), cache)
    with pytest.raises(MissingDataError):
        ClassFolders(tmp_path / 'nothing', 32)
    with pytest.raises(OptionError):
        TinyDigits('training')
    monkeypatch.setattr(module, '_moments', lambda *args, f=module._moments: f(*args) * 1e6)
    with pytest.raises(DataError):
        cache_latents(vae, ClassFolders(images, 32), tmp_path)


def moments(change):
    return lambda f: np.save(f / 'moments.npy', change(np.load(f / 'moments.npy')))


@pytest.mark.parametrize(
    'damage',
    [
        moments(lambda m: m[:6]),
        lambda folder: os.truncate(folder / 'moments.npy', 10_000),
        lambda folder: (folder / 'moments.npy').unlink(),
        lambda folder: (folder / 'moments.npy').write_bytes(b''),
        lambda folder: np.save(folder / 'class_labels.npy', np.zeros(6, np.int64)),
        lambda folder: np.save(folder / 'class_labels.npy', np.array([object()] * 7)),
    ],
)
def test_a_damaged_cache_is_refused_when_it_is_opened(damage, cache: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(cache, tmp_path / 'cache')
    damage(folder)
    with pytest.raises(DataError, match=str(folder)):
        CachedLatents(folder, conditions=['class_labels'])


def test_tool(images: Path, vae: AutoencoderKL, tmp_path: Path, tools) -> None:
    vae.save_pretrained(tmp_path / 'vae')
    out = tmp_path / 'out'
    options = [out, '--size', '32', '--num-workers', '0', '--device', 'cpu']
    tools('cache_latents.py', images, tmp_path / 'vae', *options)
    assert json.loads((out / 'latents.json').read_text())['classes'] == ['cat', 'dog']
    tools.error('cache_latents.py', images, tmp_path / 'nothing', *options)
