"""Converted public weights compute what the published formulas do; files, reports, refusals."""

import argparse
import pickle
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmvttt.checkpoints.authors import by_our_names
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.read import read_weights
from mmvttt.convert import convert_checkpoint
from mmvttt.errors import CheckpointError
from mmvttt.models.backbones import T5, HViT3, ViT3

from ..models import published

TOOL = Path(__file__).resolve().parents[2] / 'tools' / 'convert_checkpoint.py'
CLASSES = 5


DIMS, DEPTHS, HEADS = (16, 24, 32, 48), (1, 2, 1, 1), (2, 3, 2, 4)
H_ARCH = dict(embed_dims=DIMS, depths=DEPTHS, num_heads=HEADS)
PLAIN_ARCH = dict(embed_dims=48, num_layers=3, num_heads=3, feedforward_channels=192)


def plain() -> dict[str, Tensor]:
    return published.random_weights(published.plain_shapes(48, 3, 3, CLASSES))


def hierarchical(classes: int = 0) -> dict[str, Tensor]:
    shapes = published.hierarchical_shapes(DIMS, DEPTHS, HEADS, classes)
    return published.random_weights(shapes)


def with_tables(weights: dict[str, Tensor], inside: str) -> dict[str, Tensor]:
    """The rotary tables, as the public models save them in every block."""
    names = [f'{n[: -len(".cpe.bias")]}.{inside}' for n in weights if n.endswith('.cpe.bias')]
    return weights | {f'{name}rope.rotations': torch.zeros(4, 4, 8, 2) for name in names}


def dense(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A whole detector's checkpoint."""
    others = {'neck.lateral_convs.0.conv.weight': torch.ones(2), 'roi_head.bias': torch.ones(3)}
    return {f'backbone.{name}': value for name, value in weights.items()} | others


def load(model: torch.nn.Module, weights: dict[str, Tensor]) -> torch.nn.Module:
    own = {n.removeprefix('backbone.'): v for n, v in weights.items() if n.startswith('backbone.')}
    model.load_state_dict(own)
    return model.eval()


def logits(model: torch.nn.Module, weights: dict[str, Tensor], image: Tensor) -> Tensor:
    with torch.no_grad():
        feature = model(image[None])[0]
    return feature @ weights['head.fc.weight'].T + weights['head.fc.bias']


# fp32, the order of sums; the values compared are of size 1.
CLOSE = dict(rtol=1e-5, atol=1e-5)


T5_ARCH = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
# Public weights, our model of them, the formula, sizes of images, tables for one size in them.
CLASSIFIERS = {
    'ViT3': (
        plain,
        lambda: ViT3(PLAIN_ARCH, out_type='avg_featmap'),
        lambda weights, image: published.plain_logits(weights, image, depth=3, heads=3),
        [(16, 16), (48, 80)],
        0,
    ),
    'HViT3': (
        lambda: with_tables(hierarchical(CLASSES), ''),
        lambda: HViT3(H_ARCH, out_type='avg_featmap'),
        lambda weights, image: published.hierarchical_logits(weights, image, DEPTHS, HEADS),
        [(32, 32), (50, 93)],
        sum(DEPTHS),
    ),
    'T5': (
        lambda: published.t5_weights(32, 2, 2, 64, 16),
        lambda: T5(T5_ARCH, img_size=64, out_type='avg_featmap'),
        lambda weights, image: published.t5_logits(weights, image, depth=2, heads=2),
        [(64, 64)],
        0,
    ),
}


@pytest.mark.parametrize('name', CLASSIFIERS)
def test_classifiers_compute_the_published_formula(name: str) -> None:
    make, build, formula, sizes, tables = CLASSIFIERS[name]
    weights = make()
    done = by_our_names(weights)
    assert done.complete
    assert len(done.dropped) == tables
    assert len(done.matched) == len(weights) - tables
    model = load(build(), done.weights)
    for size in sizes:
        image = torch.randn(3, *size, generator=torch.Generator().manual_seed(1))
        expected = formula(weights, image)
        assert expected.std() > 0.1
        torch.testing.assert_close(logits(model, done.weights, image)[0], expected, **CLOSE)


@pytest.mark.parametrize('size', [(33, 70), (5, 1)])
def test_detectors_backbone_computes_the_published_formula(size: tuple[int, int]) -> None:
    weights = hierarchical()
    done = by_our_names(dense(with_tables(weights, 'attn.')))
    assert done.complete
    assert len(done.dropped) == sum(DEPTHS)
    assert torch.equal(done.weights['roi_head.bias'], torch.ones(3))
    model = load(HViT3(H_ARCH), done.weights)
    image = torch.randn(3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        maps = model(image[None])
    for ours, theirs in zip(
        maps, published.hierarchical_features(weights, image, DEPTHS, HEADS), strict=True
    ):
        torch.testing.assert_close(ours[0], theirs, **CLOSE)


@pytest.mark.parametrize('container', ['model', 'state_dict', None])
def test_files_and_their_containers(tmp_path: Path, container: str | None) -> None:
    weights, averaged = plain(), {n: 2 * v for n, v in plain().items()}
    content = weights if container is None else {container: weights, 'state_dict_ema': averaged}
    torch.save(content, tmp_path / 'public.pth')
    assert convert_checkpoint(tmp_path / 'public.pth', tmp_path / 'sub/ours.pth').complete
    written = torch.load(tmp_path / 'sub/ours.pth', weights_only=True)
    assert written['meta']['source'] == 'public.pth'
    assert torch.equal(written['state_dict']['head.fc.bias'], weights['head.bias'])
    if container:
        convert_checkpoint(tmp_path / 'public.pth', tmp_path / 'ema.pth', ema=True)
        written = torch.load(tmp_path / 'ema.pth', weights_only=True)
        assert torch.equal(written['state_dict']['head.fc.bias'], averaged['head.bias'])
    else:
        with pytest.raises(CheckpointError, match=r'no averaged weights.*state_dict_ema'):
            read_weights(tmp_path / 'public.pth', ema=True)


def test_a_config_of_yacs_or_argparse_is_read_without_running_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yacs = types.ModuleType('yacs.config')
    yacs.CfgNode = type('CfgNode', (dict,), {'__module__': 'yacs.config'})
    monkeypatch.setitem(sys.modules, 'yacs', types.ModuleType('yacs'))
    monkeypatch.setitem(sys.modules, 'yacs.config', yacs)
    node = yacs.CfgNode(MODEL=yacs.CfgNode(NAME='vit3'), LR=4e-3)
    node.frozen = True
    path = tmp_path / 'training.pth'
    torch.save({'model': plain(), 'config': node, 'args': argparse.Namespace(lr=1)}, path)
    monkeypatch.delitem(sys.modules, 'yacs.config')
    assert torch.equal(read_weights(path)['head.fc.bias'], plain()['head.bias'])
    # The allow-list ends with the call.
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def run_tool(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, 'argv', ['convert_checkpoint.py', *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name='__main__')


def test_the_tool_prints_the_table_and_its_result_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = with_tables(hierarchical(CLASSES), '')
    torch.save({'model': weights}, tmp_path / 'public.pth')
    run_tool(monkeypatch, tmp_path / 'public.pth', tmp_path / 'ours.pth')
    printed = ' '.join(capsys.readouterr().out.split())
    for text in ('matched', 'layers.*.blocks.*.attn.w3', 'backbone.stages.*.blocks.*.mixer.w3'):
        assert text in printed
    assert 'dropped' in printed
    assert 'a table for one image size' in printed
    # A classifier's weights in a detector: everything but the norms of the outputs.
    model = HViT3(H_ARCH)
    report = load_pretrained(model, tmp_path / 'ours.pth', prefix='backbone.')
    assert all(name.startswith('norms.') for name in report.missing)
    assert len(report.missing) == 8
    w3 = by_our_names(weights).weights['backbone.stages.1.blocks.1.mixer.w3']
    assert torch.equal(model.stages[1].blocks[1].mixer.w3, w3)


@pytest.mark.parametrize(
    ('change', 'named'),
    [
        (dict(surprise=torch.ones(1)), 'left over'),
        ({'blocks.1.attn.w4': torch.ones(1)}, 'blocks.*.attn.w4'),
    ],
)
def test_the_tool_fails_where_something_does_not_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict,
    named: str,
) -> None:
    torch.save(plain() | change, tmp_path / 'public.pth')
    with pytest.raises(SystemExit, match='nothing was written'):
        run_tool(monkeypatch, tmp_path / 'public.pth', tmp_path / 'ours.pth')
    assert named in capsys.readouterr().out
    assert not (tmp_path / 'ours.pth').exists()


@pytest.mark.parametrize('prefix', ['', 'backbone.'])
@pytest.mark.parametrize('make', [plain, hierarchical])
def test_a_public_file_is_loaded(
    tmp_path: Path, make: Callable, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As the authors evaluate it: the averaged weights where there are any."""
    caplog.set_level('INFO')
    weights = {f'{prefix}{n}': v for n, v in make().items()}
    averaged = {name: value + 1 for name, value in weights.items()}
    content = dict(model=weights, state_dict_ema=averaged, optimizer={}, max_accuracy_e=84.0)
    torch.save(content, tmp_path / 'public.pth')
    model = ViT3(PLAIN_ARCH) if make is plain else HViT3(H_ARCH)
    for options, source in (({}, averaged), ({'ema': True}, averaged), ({'key': 'model'}, weights)):
        caplog.clear()
        report = load_pretrained(model, tmp_path / 'public.pth', **options)
        assert not report.missing
        assert not report.mismatched
        first = next(iter(model.state_dict().values()))
        assert torch.equal(first, next(iter(by_our_names(source).weights.values())))
        lines = [r.getMessage() for r in caplog.records if 'averaged' in r.getMessage()]
        assert len(lines) == 1
        assert f'{len(weights)} tensors' in lines[0]
