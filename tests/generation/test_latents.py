"""Caches of latents: what is in them, stops, and what is wrong with them."""

import copy
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip('mmengine')
from mmvttt.errors import DataError, MissingDataError, UsageError
from mmvttt.openmmlab.datasets import latents as module
from mmvttt.openmmlab.datasets.latents import CachedLatents, ClassFolders, TinyDigits, cache_latents

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


def test_half_of_the_images_are_mirrored(cache: Path) -> None:
    data = CachedLatents(cache)
    # Workers get the files, not their contents.
    assert (cache / 'moments.npy').stat().st_size > 10000 > len(pickle.dumps(data))
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again[1]['class_labels'], data[1]['class_labels'])
    data._arrays['moments'] = np.zeros((7, 2, 8, 2, 2), np.float32)
    data.arrays['moments'][:, 1, :4] = 1
    torch.manual_seed(0)
    mirrored = [data[0]['latents'].mean().item() > 0 for _ in range(400)]
    # Three standard errors.
    assert np.mean(mirrored) == pytest.approx(0.5, abs=0.075)
    data.flip = False
    assert data[0]['latents'].mean() < 0


def test_a_stopped_cache_goes_on(
    images: Path, vae: AutoencoderKL, cache: Path, tmp_path: Path
) -> None:
    source = ClassFolders(images, 32)

    class Stopped(ClassFolders):
        def __getitem__(self, index: int):
            if index == 5:
                raise KeyboardInterrupt
            return source[index]

    with pytest.raises(KeyboardInterrupt):
        cache_latents(vae, Stopped(images, 32), tmp_path, 2, dtype='float32')
    with pytest.raises(DataError, match='has 4 of 7 images'):
        CachedLatents(tmp_path)
    seen = []
    source.loader = lambda path, loader=source.loader: seen.append(path) or loader(path)
    cache_latents(vae, source, tmp_path, 2, dtype='float32')
    # The first is read once more, for the shape.
    assert [Path(p).stem for p in seen] == ['0', '4', '5', '6']
    for name in ('moments.npy', 'class_labels.npy', 'latents.json'):
        assert (tmp_path / name).read_bytes() == (cache / name).read_bytes(), name


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
    with pytest.raises(MissingDataError, match=r'there is no .*class_labels\.npy'):
        CachedLatents(folder, conditions=['class_labels'])


def test_what_is_wrong_with_a_cache(
    images: Path, vae: AutoencoderKL, cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(MissingDataError, match=r'tools/cache_latents\.py'):
        CachedLatents(tmp_path)
    with pytest.raises(UsageError, match='a cache of another kind'):
        cache_latents(vae, ClassFolders(images, 16), cache)
    with pytest.raises(MissingDataError, match='folder for each class'):
        ClassFolders(tmp_path / 'nothing', 32)
    with pytest.raises(ValueError, match="split='training'"):
        TinyDigits('training')
    folder = shutil.copytree(cache, tmp_path / 'cache')
    broken = np.load(folder / 'moments.npy')
    broken[3, :, 1] = np.nan
    np.save(folder / 'moments.npy', broken)
    with pytest.raises(DataError, match=r'image 3 of the cache .* is not finite in moments\.npy'):
        CachedLatents(folder)[3]


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
    with pytest.raises((DataError, MissingDataError)) as error:
        CachedLatents(folder, conditions=['class_labels'])
    assert str(folder) in str(error.value)


def test_a_file_that_is_shortened_while_it_is_read(cache: Path, tmp_path: Path) -> None:
    copied = CachedLatents(shutil.copytree(cache, tmp_path / 'cache'))
    copied[0]
    os.truncate(copied.root / 'moments.npy', 200)
    with pytest.raises(DataError, match=r"moments\.npy' was shortened while it was read"):
        copied[len(copied) - 1]


def test_other_layouts_of_the_same_numbers(cache: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(cache, tmp_path / 'cache')
    moments(lambda m: np.asfortranarray(m.astype('>f4')))(folder)
    np.save(folder / 'class_labels.npy', np.load(folder / 'class_labels.npy').astype(np.uint8))
    items = []
    for root in (cache, folder):
        torch.manual_seed(0)
        items.append(CachedLatents(root)[5])
    assert torch.equal(items[0]['latents'], items[1]['latents'])
    assert items[1]['class_labels'].dtype == torch.int64


def test_another_autoencoder_or_other_images_do_not_mix(
    images: Path, vae: AutoencoderKL, cache: Path, tmp_path: Path
) -> None:
    before = (cache / 'moments.npy').read_bytes()
    other = copy.deepcopy(vae)
    with torch.no_grad():
        next(other.parameters()).add_(1e-3)
    with pytest.raises(UsageError, match=r'of another kind \(autoencoder: '):
        cache_latents(other, ClassFolders(images, 32), cache, dtype='float32')
    # As many images of the same classes, one of them another file.
    other = shutil.copytree(images, tmp_path / 'images')
    changed = other / 'cat' / '1.png'
    content = changed.read_bytes()
    for change in (
        lambda: changed.write_bytes(content[:-50] + bytes(50)),
        lambda: (changed.write_bytes(content), changed.rename(changed.with_name('1b.png'))),
    ):
        change()
        with pytest.raises(UsageError, match=r'of another kind \(files: '):
            cache_latents(vae, ClassFolders(other, 32), cache, dtype='float32')
    # The same images in another place.
    moved = shutil.copytree(images, tmp_path / 'moved')
    cache_latents(copy.deepcopy(vae), ClassFolders(moved, 32), cache, dtype='float32')
    assert (cache / 'moments.npy').read_bytes() == before


def test_overflow_is_an_error(
    images: Path, vae: AutoencoderKL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, '_moments', lambda *args, f=module._moments: f(*args) * 1e6)
    with pytest.raises(DataError, match="give dtype 'float32'"):
        cache_latents(vae, ClassFolders(images, 32), tmp_path)


def test_tool(images: Path, vae: AutoencoderKL, tmp_path: Path, tools) -> None:
    vae.save_pretrained(tmp_path / 'vae')
    out = tmp_path / 'out'
    options = [out, '--size', '32', '--num-workers', '0', '--device', 'cpu']
    printed = tools('cache_latents.py', images, tmp_path / 'vae', *options)
    assert '7 images of 2 classes' in printed
    assert json.loads((out / 'latents.json').read_text())['classes'] == ['cat', 'dog']
    error = tools.error('cache_latents.py', images, tmp_path / 'nothing', *options)
    assert 'there is no autoencoder' in error
