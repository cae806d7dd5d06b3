"""tools/generate.py: the same images whatever happens, its files, its refusals."""

from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('mmengine')
from mmengine.config import Config
from PIL import Image

from mmvttt.errors import DataError, UsageError
from mmvttt.openmmlab.apis import generate as api
from mmvttt.openmmlab.registry import MODELS

from .small import SMALL, flow_model, model

pytest.importorskip('diffusers')
from diffusers import AutoencoderKL, SD3Transformer2DModel

TOOL = Path(__file__).resolve().parents[2] / 'tools' / 'generate.py'


def save(config: dict, folder: Path, averaged: bool = True) -> tuple[str, str]:
    """A config and a checkpoint of its model, with weights that draw something."""
    torch.manual_seed(0)
    network = MODELS.build(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    Config(dict(model=config)).dump(folder / 'config.py')
    content = dict(state_dict=network.state_dict(), meta={})
    if averaged:
        content['ema_state_dict'] = {}
    torch.save(content, folder / 'weights.pth')
    return str(folder / 'config.py'), str(folder / 'weights.pth')


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`tool(*options, config=…)` runs the command line in a folder, on a small model."""
    monkeypatch.chdir(tmp_path)
    spec = spec_from_file_location('generate_tool', TOOL)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*options: str, config: dict | None = None, averaged: bool = True) -> None:
        files = save(config or model(), tmp_path, averaged)
        module.main([*files, '--steps', '3', '--device', 'cpu', *options])

    return run


def images(name: str) -> np.ndarray:
    with np.load(name) as arrays:
        assert arrays.files == ['arr_0']
        return arrays['arr_0']


def test_files(tool: Callable, capsys: pytest.CaptureFixture) -> None:
    tool('--classes', 'all', '--count', '12', '--out', 'a/grid.png', '--npz', 'a/samples.npz')
    found = images('a/samples.npz')
    # As ADM's evaluator reads them; one channel is three equal ones.
    assert (found.shape, found.dtype) == ((12, 8, 8, 3), np.uint8)
    assert (found[..., 0] == found[..., 1]).all()
    assert found.std() > 10
    assert len({image.tobytes() for image in found}) == 12
    # A column for each class; images are enlarged four times.
    grid = np.asarray(Image.open('a/grid.png'))
    assert grid.shape == (2 * 34 + 2, 10 * 34 + 2, 3)
    assert (grid[36:68:4, 36:68:4] == found[11]).all()
    out = capsys.readouterr().out
    assert '12 images of 8×8 → a/grid.png' in out
    assert 'does not say that its weights are averaged' not in out


def test_what_was_stopped_goes_on(tool: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ('--classes', '3', '7', '--count', '10', '--batch-size', '4', '--npz')
    tool(*options, 'whole.npz')
    original, calls = api.sample, []

    def stopped(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(api, 'sample', stopped)
    with pytest.raises(KeyboardInterrupt):
        tool(*options, 'parts.npz')
    tool(*options, 'parts.npz')
    # One batch before the stop, the one that was stopped, the two that were left.
    assert len(calls) == 4
    assert (images('parts.npz') == images('whole.npz')).all()


def test_processes_share_the_work(tool: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of rank 1 of 2 first, then of rank 0: what one process makes."""
    options = ('--classes', '3', '7', '--count', '10', '--batch-size', '4', '--npz')
    tool(*options, 'one.npz')
    monkeypatch.setattr(api, 'get_world_size', lambda: 2)
    monkeypatch.setattr(api, 'get_rank', lambda: 1)
    with monkeypatch.context() as patch:
        # It would wait for rank 0, and leaves the rest to it.
        patch.setattr(api, 'read_images', lambda files: np.zeros((1, 8, 8, 3), np.uint8))
        tool(*options, 'two.npz')
    parts = sorted(p.name for p in Path('two_parts').glob('*.npy'))
    assert [p.partition('_')[2] for p in parts] == ['00000004_4.npy']
    monkeypatch.setattr(api, 'get_rank', lambda: 0)
    tool(*options, 'two.npz')
    assert (images('one.npz') == images('two.npz')).all()


def test_batches_of_another_run_are_not_taken(
    tool: Callable, capsys: pytest.CaptureFixture
) -> None:
    """Of another seed, under the same name; a larger number of images takes what is there."""
    options = ('--classes', '7', '--count', '2', '--batch-size', '2')
    for seed in ('0', '1', '0'):
        tool(*options, '--seed', seed, '--npz', 'a.npz')
        Path('a.npz').rename(f'{seed}.npz')
    assert (images('0.npz') != images('1.npz')).any()
    first, second = sorted(Path('a_parts').glob('*.npy'), key=lambda path: path.stat().st_mtime)
    before = first.stat().st_mtime_ns, second.stat().st_mtime_ns
    tool(*options[:2], '--count', '4', '--batch-size', '2', '--npz', 'a.npz')
    assert before == (first.stat().st_mtime_ns, second.stat().st_mtime_ns)
    assert (images('a.npz')[:2] == images('0.npz')).all()
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(SystemExit):
        tool(*options, '--npz', 'a.npz')
    assert 'is damaged' in capsys.readouterr().err


def test_classes_balanced_or_drawn(tool: Callable) -> None:
    settings = api.Settings(3000, (4, 7, 9))
    assert [settings.class_of(i) for i in range(4)] == [4, 7, 9, 4]
    drawn = api.Settings(3000, (4, 7, 9), draw_classes=True)
    chosen = [drawn.class_of(i) for i in range(3000)]
    assert chosen == [drawn.class_of(i) for i in range(3000)]
    for c in (4, 7, 9):
        # Four standard errors; not a third each.
        assert chosen.count(c) == pytest.approx(1000, abs=4 * (3000 * 2 / 9) ** 0.5)
    assert len({chosen.count(c) for c in (4, 7, 9)}) > 1
    assert chosen[:9] != [4, 7, 9] * 3
    assert chosen != [
        api.Settings(1, (4, 7, 9), seed=1, draw_classes=True).class_of(i) for i in range(3000)
    ]
    tool('--classes', 'all', '--count', '20', '--draw-classes', '--npz', 'drawn.npz')
    tool('--classes', 'all', '--count', '20', '--npz', 'balanced.npz')
    assert (images('drawn.npz') != images('balanced.npz')).any()


def test_batches_do_not_change_the_images(tool: Callable) -> None:
    tool('--classes', '1', '--count', '5', '--batch-size', '5', '--npz', 'a.npz')
    tool('--classes', '1', '--count', '5', '--batch-size', '2', '--npz', 'b.npz')
    # A sum in another order may round another way: one level of 255.
    assert np.abs(images('a.npz').astype(int) - images('b.npz')).max() <= 1


def test_autoencoder_and_any_size(tool: Callable, tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = dict(
        block_out_channels=(8, 8),
        down_block_types=('DownEncoderBlock2D',) * 2,
        up_block_types=('UpDecoderBlock2D',) * 2,
        norm_num_groups=4,
    )
    vae = AutoencoderKL(**blocks, sample_size=16)
    vae.save_pretrained(tmp_path / 'vae')
    config = model(transformer=dict(in_channels=4))
    tool('--classes', '1', '--vae', 'vae', '--size', '16', '24', '--npz', 'a.npz', config=config)
    assert images('a.npz').shape == (1, 16, 24, 3)
    network, averaged = api.load_generator(Config(dict(model=config)), 'weights.pth')
    assert averaged
    settings = api.Settings(1, (1,), steps=3, size=(8, 12))
    latents = []
    original = api._pixels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, '_pixels', lambda x, *rest: latents.append(x) or original(x, *rest))
        files = api.generate(network, settings, tmp_path / 'again', vae)
        next(vae.decoder.parameters()).data.mul_(2)
        assert api.generate(network, settings, tmp_path / 'again', vae) != files
        next(vae.decoder.parameters()).data.div_(2)
    with torch.no_grad():
        decoded = vae.decode(latents[0] / vae.config.scaling_factor).sample[0]
    expected = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 0)
    assert np.abs(images('a.npz')[0].astype(int) - expected.numpy()).max() <= 1


def test_guidance_and_schedulers(tool: Callable) -> None:
    config = model(transformer=dict(in_channels=3))
    options = ('--classes', '1', '2', '--npz')
    tool(*options, 'plain.npz', config=config)
    tool(*options, 'guided.npz', '--guidance', '4', config=config)
    tool(*options, 'other.npz', '--scheduler', 'dpm++', config=config)
    flow = flow_model(transformer=dict(in_channels=3, out_channels=3))
    tool(*options, 'flow.npz', '--scheduler', 'euler', config=flow)
    found = [images(f'{n}.npz') for n in ('plain', 'guided', 'other', 'flow')]
    for i in range(4):
        for j in range(i):
            assert (found[i] != found[j]).any()


def test_measures(tool: Callable, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    options = ['--classes', 'all', '--count', '30', '--npz', 'a.npz', '--reference']
    reference = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)
    np.savez('reference.npz', reference)
    # ADM's files hold statistics too.
    np.savez('statistics.npz', mu=np.zeros(4), sigma=np.eye(4), arr_0=reference)
    Path('images').mkdir()
    for i, image in enumerate(reference):
        Image.fromarray(image).save(f'images/{i:02}.{("png", "PNG", "bmp")[i % 3]}')
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)).eval()
    batch = torch.export.Dim('batch')
    exported = torch.export.export(
        extractor, (torch.zeros(2, 3, 8, 8),), dynamic_shapes=({0: batch},)
    )
    torch.export.save(exported, 'extractor.pt2')
    with torch.no_grad():
        pixels = torch.from_numpy(reference).permute(0, 3, 1, 2) / 255
        np.save('features.npy', extractor(pixels).numpy())
    printed = []
    for name in ('reference.npz', 'images', 'features.npy', 'statistics.npz'):
        tool(*options, name, '--features', 'extractor.pt2')
        lines = capsys.readouterr().out.splitlines()[-3:]
        printed.append([line.split() for line in lines])
        assert [line[0] for line in printed[-1]] == ['frechet', 'precision', 'recall']
    assert all(found == printed[0] for found in printed)


def test_inception_score(tool: Callable, capsys: pytest.CaptureFixture) -> None:
    layers = torch.nn.Flatten(), torch.nn.Linear(192, 4), torch.nn.Softmax(1)
    batch = torch.export.Dim('batch')
    for name, network in (('classifier', layers), ('logits', layers[:2])):
        exported = torch.export.export(
            torch.nn.Sequential(*network).eval(),
            (torch.zeros(2, 3, 8, 8),),
            dynamic_shapes=({0: batch},),
        )
        torch.export.save(exported, f'{name}.pt2')
    options = ('--classes', 'all', '--npz', 'a.npz', '--classifier')
    tool(*options, 'classifier.pt2')
    name, value = capsys.readouterr().out.splitlines()[-1].split()
    with torch.no_grad():
        pixels = torch.from_numpy(images('a.npz')).permute(0, 3, 1, 2) / 255
        p = torch.nn.Sequential(*layers)(pixels).double()
    expected = (p * (p / p.mean(0)).log()).sum(1).mean().exp()
    assert name == 'inception_score'
    assert float(value) == pytest.approx(expected.item(), abs=1e-4)
    with pytest.raises(SystemExit):
        tool(*options, 'logits.pt2')
    assert 'end the classifier with a softmax' in capsys.readouterr().err


@pytest.mark.parametrize('option', ['--reference', '--features', '--classifier'])
def test_what_is_missing_is_noticed_before_drawing(
    tool: Callable, capsys: pytest.CaptureFixture, option: str
) -> None:
    with pytest.raises(SystemExit):
        tool('--classes', '1', '--npz', 'a.npz', option, 'nothing.npz')
    assert "'nothing.npz'" in capsys.readouterr().err
    assert not Path('a_parts').exists()


def test_prompts(tool: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A small SD3 without its text encoders: embedded prompts from a file."""
    transformer = dict(
        type='diffusers.SD3Transformer2DModel',
        sample_size=8,
        patch_size=2,
        in_channels=3,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=9,
        out_channels=3,
        pos_embed_max_size=8,
    )
    assert SD3Transformer2DModel
    config = dict(flow_model(label_dropout=0.0), transformer=transformer)
    rng = np.random.default_rng(0)
    told = dict(
        encoder_hidden_states=rng.normal(size=(2, 5, 12)).astype(np.float32),
        pooled_projections=rng.normal(size=(2, 9)).astype(np.float32),
    )
    np.savez('prompts.npz', **told)
    tool('--prompts', 'prompts.npz', '--npz', 'a.npz', config=config)
    assert images('a.npz').shape == (2, 8, 8, 3)
    with pytest.raises(SystemExit):
        tool('--prompts', 'prompts.npz', '--npz', 'b.npz', '--guidance', '3.5', config=config)
    assert 'needs null_encoder_hidden_states' in capsys.readouterr().err
    np.savez('both.npz', **told, **{f'null_{n}': 0 * v[:1] for n, v in told.items()})
    tool('--prompts', 'both.npz', '--npz', 'c.npz', '--guidance', '3.5', config=config)
    assert (images('c.npz') != images('a.npz')).any()
    before = images('a.npz')
    np.savez('prompts.npz', **{n: v + 1 for n, v in told.items()})
    tool('--prompts', 'prompts.npz', '--npz', 'a.npz', config=config)
    assert (images('a.npz') != before).any()
    for options, words in (
        (('--classes', '1'), 'give --prompts, not --classes'),
        (('--prompt', 'a cat'), 'needs --pipeline FOLDER'),
        (('--prompts', 'nothing.npz'), "no prompts 'nothing.npz'"),
    ):
        with pytest.raises(SystemExit):
            tool(*options, '--npz', 'd.npz', config=config)
        assert words in capsys.readouterr().err


def test_without_text_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    original = api.find_spec
    monkeypatch.setattr(api, 'find_spec', lambda n: None if n == 'transformers' else original(n))
    with pytest.raises(UsageError, match='needs the text encoders of transformers'):
        api.encode_prompts('folder', ['a cat'])


def test_what_is_not_finite_is_no_black_image() -> None:
    broken = torch.zeros(3, 3, 2, 2)
    broken[1, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match='image 8 is not finite, in its latents'):
        api._pixels(broken, None, [7, 8, 9])


def test_large_pictures_are_no_features(tool: Callable, capsys: pytest.CaptureFixture) -> None:
    Path('images').mkdir()
    config = model(transformer=dict(in_channels=3))
    options = ('--classes', '1', '--size', '68', '68', '--reference', 'images', '--npz', 'a.npz')
    with pytest.raises(SystemExit):
        tool(*options, config=config)
    assert 'images of 68×68 have too many pixels' in capsys.readouterr().err
    assert not Path('a_parts').exists()


NO_NULL = model(transformer=dict(null_class=False), label_dropout=0.0)


@pytest.mark.parametrize(
    ('options', 'config', 'words'),
    [
        (('--classes', '10'), None, 'class 10 does not exist: the model has the classes 0 to 9'),
        (('--classes', 'cat'), None, '--classes cat: give numbers'),
        ((), None, 'give classes, of 0 to 9'),
        (('--classes', '1', '--guidance', '2'), NO_NULL, 'needs a null class'),
        (('--classes', '1', '--scheduler', 'ddpm'), flow_model(), 'trained on rectified flow'),
        (('--classes', '1', '--size', '6', '8'), None, '--size 6 8: give multiples of 4'),
        (('--classes', '1', '--vae', 'nowhere'), None, "no autoencoder in 'nowhere'"),
        (('--classes', '1'), model(transformer=dict(in_channels=4)), 'give --vae FOLDER'),
    ],
)
def test_bad_input(
    tool: Callable,
    capsys: pytest.CaptureFixture,
    options: tuple,
    config: dict | None,
    words: str,
) -> None:
    with pytest.raises(SystemExit):
        tool(*options, config=config)
    error = capsys.readouterr().err
    assert words in error
    assert error.count('\n') == 1
    assert not Path('work_dirs/generate/grid.png').exists()


def test_checkpoints(tool: Callable, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    tool('--classes', '1', averaged=False)
    words = 'the checkpoint does not say that its weights are averaged'
    assert words in capsys.readouterr().out
    content = torch.load('weights.pth', weights_only=True)
    torch.save(dict(content, meta=dict(averaged=True)), 'weights.pth')
    assert api.load_generator(Config.fromfile('config.py'), 'weights.pth')[1]
    wider = model(transformer=dict(arch=dict(SMALL, num_layers=3)))
    with pytest.raises(ValueError, match='missing: transformer'):
        api.load_generator(Config(dict(model=wider)), 'weights.pth')
    backbone = dict(type='mmvttt.ViT3', arch='tiny')
    with pytest.raises(UsageError, match='the config describes a'):
        api.load_generator(Config(dict(model=backbone)), 'weights.pth')
