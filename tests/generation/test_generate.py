"""tools/generate.py: the same images whatever happens, its files, its errors."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('mmengine')
from mmengine.config import Config
from PIL import Image

from mmvttt.errors import DataError, UsageError
from mmvttt.openmmlab.apis import generate as api
from mmvttt.openmmlab.models.diffusion_model import DiffusionModel
from mmvttt.openmmlab.registry import MODELS

from .small import SD3, SMALL, flow_model, model, small_vae, spread

pytest.importorskip('diffusers')


@pytest.fixture
def draw(tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`draw(*options, config=…)` runs the tool on a small model; `error`: as it should not end."""
    monkeypatch.chdir(tmp_path)

    def draw(
        *options: str, config: dict | None = None, averaged: bool = True, error: int = 0
    ) -> str:
        torch.manual_seed(0)
        config = config or model()
        network = spread(MODELS.build(config))
        Config(dict(model=config)).dump('config.py')
        content = dict(state_dict=network.state_dict(), meta={})
        torch.save({**content, **(dict(ema_state_dict={}) if averaged else {})}, 'weights.pth')
        run = partial(tools.error, status=int(error)) if error else tools
        files = ('config.py', 'weights.pth')
        return run('generate.py', *files, '--steps', '3', '--device', 'cpu', *options)

    return draw


def images(name: str) -> np.ndarray:
    with np.load(name) as arrays:
        assert arrays.files == ['arr_0']
        return arrays['arr_0']


def test_files(draw: Callable) -> None:
    out = draw('--classes', 'all', '--count', '12', '--out', 'a/grid.png', '--npz', 'a/samples.npz')
    drawn = images('a/samples.npz')
    # As ADM's evaluator reads them; one channel is three equal ones.
    assert (drawn.shape, drawn.dtype) == ((12, 8, 8, 3), np.uint8)
    assert (drawn[..., 0] == drawn[..., 1]).all()
    assert drawn.std() > 10
    assert len({image.tobytes() for image in drawn}) == 12
    # A column for each class; images are enlarged four times.
    grid = np.asarray(Image.open('a/grid.png'))
    assert grid.shape == (2 * 34 + 2, 10 * 34 + 2, 3)
    assert (grid[36:68:4, 36:68:4] == drawn[11]).all()
    assert '12 images of 8×8 → a/grid.png' in out
    assert 'does not say that its weights are averaged' not in out


def test_stops_processes_and_batches_do_not_change_the_images(
    draw: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ('--classes', '3', '7', '--count', '10', '--batch-size', '4', '--npz')
    draw(*options, 'whole.npz')
    draw('--batch-size', '10', *options[:5], '--npz', 'one_batch.npz')
    # A sum in another order may round another way: one level of 255.
    assert np.abs(images('whole.npz').astype(int) - images('one_batch.npz')).max() <= 1
    original, calls = DiffusionModel.draw, []

    def stopped(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(DiffusionModel, 'draw', stopped)
    with pytest.raises(KeyboardInterrupt):
        draw(*options, 'parts.npz')
    draw(*options, 'parts.npz')
    # One batch before the stop, the one that was stopped, the two that were left.
    assert len(calls) == 4
    assert (images('parts.npz') == images('whole.npz')).all()
    # The batches of rank 1 of 2 first, then of rank 0.
    monkeypatch.setattr(api, 'get_world_size', lambda: 2)
    monkeypatch.setattr(api, 'get_rank', lambda: 1)
    # It would wait for rank 0, which writes the file.
    assert '_00000000_4.npy' in draw(*options, 'two.npz', error=1)
    parts = sorted(p.name for p in Path('two_parts').glob('*.npy'))
    assert [p.partition('_')[2] for p in parts] == ['00000004_4.npy']
    monkeypatch.setattr(api, 'get_rank', lambda: 0)
    draw(*options, 'two.npz')
    assert (images('whole.npz') == images('two.npz')).all()


def test_batches_of_another_run_are_not_taken(draw: Callable) -> None:
    """Of another seed, under the same name; a larger number of images takes what is there."""
    options = ('--classes', '7', '--count', '2', '--batch-size', '2')
    for seed in ('0', '1', '0'):
        draw(*options, '--seed', seed, '--npz', 'a.npz')
        Path('a.npz').rename(f'{seed}.npz')
    assert (images('0.npz') != images('1.npz')).any()
    first, second = sorted(Path('a_parts').glob('*.npy'), key=lambda path: path.stat().st_mtime)
    before = first.stat().st_mtime_ns, second.stat().st_mtime_ns
    draw(*options[:2], '--count', '4', '--batch-size', '2', '--npz', 'a.npz')
    assert before == (first.stat().st_mtime_ns, second.stat().st_mtime_ns)
    assert (images('a.npz')[:2] == images('0.npz')).all()
    first.write_bytes(first.read_bytes()[:100])
    assert 'is damaged' in draw(*options, '--npz', 'a.npz', error=1)


def test_autoencoder_and_any_size(draw: Callable, tmp_path: Path) -> None:
    vae = small_vae(sample_size=16)
    vae.save_pretrained('vae')
    config = model(transformer=dict(in_channels=4))
    draw('--classes', '1', '--vae', 'vae', '--size', '16', '24', '--npz', 'a.npz', config=config)
    assert images('a.npz').shape == (1, 16, 24, 3)
    network, averaged = api.load_generator(Config(dict(model=config)), 'weights.pth')
    assert averaged
    settings = api.Settings(1, (1,), steps=3, size=(8, 12))
    latents = []
    original = api._pixels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, '_pixels', lambda x, *rest: latents.append(x) or original(x, *rest))
        api.generate(network, settings, tmp_path / 'again', vae)
        next(vae.decoder.parameters()).data.mul_(2)
        api.generate(network, settings, tmp_path / 'again', vae)
        assert len(list((tmp_path / 'again').iterdir())) == 2
        next(vae.decoder.parameters()).data.div_(2)
    with torch.no_grad():
        decoded = vae.decode(latents[0] / vae.config.scaling_factor).sample[0]
    expected = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 0)
    assert np.abs(images('a.npz')[0].astype(int) - expected.numpy()).max() <= 1


def test_guidance_and_schedulers(draw: Callable) -> None:
    config = model(transformer=dict(in_channels=3))
    flow = flow_model(transformer=dict(in_channels=3, out_channels=3))
    seen = set()
    for options, of in (
        ((), config),
        (('--guidance', '4'), config),
        (('--scheduler', 'dpm++'), config),
        (('--scheduler', 'euler'), flow),
    ):
        draw('--classes', '1', '2', '--count', '3', '--npz', 'a.npz', *options, config=of)
        seen.add(images('a.npz').tobytes())
    assert len(seen) == 4


def test_prompts(draw: Callable) -> None:
    """A small SD3 without its text encoders: embedded prompts from a file."""
    config = dict(flow_model(label_dropout=0.0), transformer=SD3)
    rng = np.random.default_rng(0)
    told = dict(
        encoder_hidden_states=rng.normal(size=(2, 5, 12)).astype(np.float32),
        pooled_projections=rng.normal(size=(2, 9)).astype(np.float32),
    )
    np.savez('prompts.npz', **told)
    np.savez('both.npz', **told, **{f'null_{n}': 0 * v[:1] for n, v in told.items()})
    np.savez('others.npz', **{n: v + 1 for n, v in told.items()})
    drawn = []
    for options in (('prompts.npz',), ('both.npz', '--guidance', '3.5'), ('others.npz',)):
        draw('--npz', 'a.npz', '--prompts', *options, config=config)
        drawn.append(images('a.npz'))
    assert drawn[0].shape == (2, 8, 8, 3)
    assert (drawn[0] != drawn[1]).any()
    assert (drawn[0] != drawn[2]).any()
    for options, words in (
        (('--prompts', 'prompts.npz', '--guidance', '3.5'), 'needs null_encoder_hidden_states'),
        (('--classes', '1'), 'give --prompts, not --classes'),
        (('--prompt', 'a cat'), 'needs --pipeline FOLDER'),
        (('--prompts', 'nothing.npz'), "no prompts 'nothing.npz'"),
    ):
        status = 2 if words.startswith(('needs --pip', 'no prompts')) else 1
        assert words in draw(*options, '--npz', 'd.npz', config=config, error=status)


@pytest.mark.parametrize(
    ('missing', 'options', 'extra'),
    [
        ('transformers', ('--prompt', 'a cat', '--pipeline', 'sd3'), 'sd3'),
        ('diffusers', ('--classes', '1'), 'gen'),
    ],
)
def test_missing_packages(
    draw: Callable, tools, missing: str, options: tuple, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw('--classes', '1')
    monkeypatch.setitem(sys.modules, missing, None)
    error = tools.error('generate.py', 'config.py', 'weights.pth', *options, '--device', 'cpu')
    assert f"error: {missing} is not installed: pip install 'mmvttt[{extra}]'" in error


@pytest.mark.parametrize(
    ('tool', 'options'),
    [
        ('export', ['dit3_digits', '--out', 'a.onnx']),
        ('inspect_model', ['dit3_digits', 'photo.jpg']),
        ('image_demo', ['dit3_digits', 'weights.pth', 'photo.jpg']),
    ],
)
def test_tools_of_photographs_name_tools_generate(
    tool: str, options: list[str], tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new('RGB', (8, 8)).save('photo.jpg')
    Path('weights.pth').touch()
    error = tools.error(f'{tool}.py', *options)
    assert 'the config has a diffusion model' in error
    assert 'tools/generate.py draws' in error
    assert error.count('\n') == 1
    assert {path.name for path in tmp_path.iterdir()} == {'photo.jpg', 'weights.pth'}


def test_what_is_not_finite_is_no_black_image() -> None:
    broken = torch.zeros(3, 3, 2, 2)
    broken[1, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match='image 8 is not finite, in its latents'):
        api._pixels(broken, None, [7, 8, 9])


NO_NULL = model(transformer=dict(null_class=False), label_dropout=0.0)
ONE = ('--classes', '1')


@pytest.mark.parametrize(
    ('options', 'config', 'words'),
    [
        (('--classes', '10'), None, 'class 10 does not exist: the model has the classes 0 to 9'),
        ((), None, 'give classes, of 0 to 9'),
        ((*ONE, '--guidance', '2'), NO_NULL, 'needs a null condition'),
        ((*ONE, '--scheduler', 'ddpm'), flow_model(), 'trained on rectified flow'),
        ((*ONE, '--size', '6', '8'), None, '--size 6 8: give multiples of 4'),
        ((*ONE, '--vae', 'nowhere'), None, "no autoencoder in 'nowhere'"),
        (ONE, model(transformer=dict(in_channels=4)), 'give --vae FOLDER'),
    ],
)
def test_bad_input_is_noticed_before_drawing(
    draw: Callable, options: tuple, config: dict | None, words: str
) -> None:
    error = draw(*options, '--npz', 'a.npz', config=config, error=1)
    assert words in error
    assert error.rstrip().rpartition('\n')[2].startswith('error')
    assert not Path('a_parts').exists()


def test_checkpoints(draw: Callable) -> None:
    assert 'does not say that its weights are averaged' in draw(*ONE, averaged=False)
    content = torch.load('weights.pth', weights_only=True)
    torch.save(dict(content, meta=dict(averaged=True)), 'weights.pth')
    assert api.load_generator(Config.fromfile('config.py'), 'weights.pth')[1]
    wider = model(transformer=dict(arch=dict(SMALL, num_layers=3)))
    with pytest.raises(ValueError, match=r'would leave \d+ tensors .* transformer\.blocks\.2'):
        api.load_generator(Config(dict(model=wider)), 'weights.pth')
    backbone = dict(type='mmvttt.ViT3', arch='tiny')
    with pytest.raises(UsageError, match='the config describes a'):
        api.load_generator(Config(dict(model=backbone)), 'weights.pth')
