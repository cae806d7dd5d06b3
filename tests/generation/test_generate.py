"""tools/generate.py: the same images whatever happens, its files, its errors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('mmengine')
from mmengine.config import Config
from PIL import Image

from mmvttt.errors import CheckpointMismatchError, DataError, UsageError
from mmvttt.openmmlab.apis import generate as api
from mmvttt.openmmlab.registry import MODELS

from ..models.building import shaken
from .small import SD3, SMALL, flow_model, model, small_vae

pytest.importorskip('diffusers')


@pytest.fixture
def draw(tools) -> Callable:
    """`draw(*options, config=…)` runs the tool on a small model; `error`: as it should not end."""

    def draw(*options: str, config: dict | None = None, error: int = 0) -> str:
        torch.manual_seed(0)
        config = config or model()
        network = shaken(MODELS.build(config))
        Config(dict(model=config)).dump('config.py')
        torch.save(dict(state_dict=network.state_dict()), 'weights.pth')
        run = partial(tools.error, status=int(error)) if error else tools
        files = ('config.py', 'weights.pth')
        return run('generate.py', *files, '--steps', '3', '--device', 'cpu', *options)

    return draw


def images(name: str) -> np.ndarray:
    with np.load(name) as arrays:
        assert arrays.files == ['arr_0']
        return arrays['arr_0']


def test_files(draw: Callable) -> None:
    draw('--classes', 'all', '--count', '12', '--out', 'a/grid.png', '--npz', 'a/samples.npz')
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


def test_processes_and_batches_do_not_change_the_images(
    draw: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ('--classes', '3', '7', '--count', '10', '--batch-size', '4', '--npz')
    draw(*options, 'whole.npz')
    draw('--batch-size', '10', *options[:5], '--npz', 'one_batch.npz')
    # A sum in another order may round another way: one level of 255.
    assert np.abs(images('whole.npz').astype(int) - images('one_batch.npz')).max() <= 1
    # Rank 1 of 2, which has no images, then rank 0, which collects them.
    parts: list = []
    monkeypatch.setattr(api, 'get_world_size', lambda: 2)
    monkeypatch.setattr(api, 'get_rank', lambda: 1)
    monkeypatch.setattr(api, 'collect_results', lambda mine, count: parts.extend(mine))
    draw(*options, 'two.npz')
    assert not Path('two.npz').exists()
    monkeypatch.setattr(api, 'get_rank', lambda: 0)
    monkeypatch.setattr(
        api, 'collect_results', lambda mine, count: [mine[0], *parts, mine[1]][:count]
    )
    draw(*options, 'two.npz')
    assert (images('whole.npz') == images('two.npz')).all()


def test_autoencoder_and_any_size(draw: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    vae = small_vae(sample_size=16)
    vae.save_pretrained('vae')
    config = model(transformer=dict(in_channels=4))
    latents, original = [], api._pixels
    monkeypatch.setattr(api, '_pixels', lambda x, *rest: latents.append(x) or original(x, *rest))
    draw('--classes', '1', '--vae', 'vae', '--size', '16', '24', '--npz', 'a.npz', config=config)
    assert images('a.npz').shape == (1, 16, 24, 3)
    with torch.no_grad():
        decoded = vae.decode(latents[0] / vae.config.scaling_factor).sample[0]
    expected = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 0)
    assert np.abs(images('a.npz')[0].astype(int) - expected.numpy()).max() <= 1


def test_settings_change_the_images(draw: Callable) -> None:
    config = model(transformer=dict(in_channels=3))
    flow = flow_model(transformer=dict(in_channels=3, out_channels=3))
    seen = set()
    for options, of in (
        ((), config),
        (('--seed', '1'), config),
        (('--classes', '1'), config),
        (('--guidance', '4'), config),
        (('--scheduler', 'dpm++'), config),
        (('--scheduler', 'euler'), flow),
    ):
        draw('--classes', '1', '2', '--count', '3', '--npz', 'a.npz', *options, config=of)
        seen.add(images('a.npz').tobytes())
    assert len(seen) == 6


def test_prompts(draw: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small SD3, whose text encoders are a table."""
    config = dict(flow_model(), transformer=SD3)
    torch.manual_seed(0)
    told = dict(encoder_hidden_states=torch.randn(2, 5, 12), pooled_projections=torch.randn(2, 9))
    nulls = {f'null_{n}': 0 * v[:1] for n, v in told.items()}
    shifted = {n: v + 1 for n, v in told.items()}
    drawn = []
    for embedded, guidance in ((told, '1'), (told | nulls, '3.5'), (shifted, '1')):
        monkeypatch.setattr(api, 'encode_prompts', lambda *_, embedded=embedded: embedded)
        prompts = ('--prompt', 'a cat', 'a dog', '--pipeline', 'sd3', '--guidance', guidance)
        draw('--npz', 'a.npz', *prompts, config=config)
        drawn.append(images('a.npz'))
    assert drawn[0].shape == (2, 8, 8, 3)
    assert (drawn[0] != drawn[1]).any()
    assert (drawn[0] != drawn[2]).any()
    draw('--classes', '1', '--npz', 'd.npz', config=config, error=1)
    draw('--prompt', 'a cat', '--npz', 'd.npz', config=config, error=2)


@pytest.mark.parametrize(
    'options',
    [
        ['export.py', 'dit3_digits', '--out', 'a.onnx'],
        ['inspect_model.py', 'dit3_digits', 'photo.jpg'],
        ['image_demo.py', 'dit3_digits', 'weights.pth', 'photo.jpg'],
    ],
)
def test_tools_of_photographs_name_tools_generate(options: list[str], tools) -> None:
    Image.new('RGB', (8, 8)).save('photo.jpg')
    Path('weights.pth').touch()
    # `inspect_model` says first where its weights come from.
    *_, last = tools.error(*options).splitlines()
    assert last.startswith('error: ')
    assert 'tools/generate.py' in last


def test_what_is_not_finite_is_no_black_image() -> None:
    broken = torch.zeros(3, 3, 2, 2)
    broken[1, 0, 0, 0] = torch.nan
    with pytest.raises(DataError):
        api._pixels(broken, None)


ONE = ('--classes', '1')


@pytest.mark.parametrize(
    ('options', 'config'),
    [
        ((), None),
        (('--classes', '10'), None),
        ((*ONE, '--size', '6', '8'), None),
        ((*ONE, '--vae', 'nowhere'), None),
        ((*ONE, '--scheduler', 'ddpm'), flow_model()),
        (ONE, model(transformer=dict(in_channels=4))),
    ],
)
def test_bad_input_is_noticed_before_drawing(
    draw: Callable, options: tuple, config: dict | None
) -> None:
    error = draw(*options, '--npz', 'a.npz', config=config, error=1)
    assert error.rstrip().rpartition('\n')[2].startswith('error')


def test_checkpoints(draw: Callable) -> None:
    draw(*ONE)
    wider = model(transformer=dict(arch=dict(SMALL, num_layers=3)))
    with pytest.raises(CheckpointMismatchError):
        api.load_generator(Config(dict(model=wider)), 'weights.pth')
    backbone = dict(type='mmvttt.ViT3', arch='tiny')
    with pytest.raises(UsageError):
        api.load_generator(Config(dict(model=backbone)), 'weights.pth')
