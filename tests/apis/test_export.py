"""Models as files of torch.export and of ONNX, at sizes other than the one they were traced at."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mmvttt.by_name import find_model, load_model
from mmvttt.deploy.export import _resized, export_module
from mmvttt.deploy.model_file import compare
from mmvttt.errors import CheckpointMismatchError, OptionError, UsageError
from mmvttt.models.backbones import T5, TimmViT, Vittt
from mmvttt.models.layers import neighborhood
from mmvttt.named_model import NamedModel
from mmvttt.openmmlab.apis.export import export_model, exportable
from mmvttt.openmmlab.export.networks import logits_of_segmentor

from ..configs.reduced import reduced
from ..models.building import shaken


def small(name: str, tmp_path: Path) -> str:
    """The path of a config of ours with a tiny model."""
    cfg = reduced(name)
    backbone = cfg.model.backbone
    if cfg.default_scope == 'mmpretrain':
        # The shallowest: tracing takes most of the time.
        if 'model_options' in backbone:
            backbone.model_options.depth = 1
        elif backbone.type != 'mmvttt.HViT3':
            backbone.arch.num_layers = 1
    path = tmp_path / f'{name}.py'
    cfg.dump(path)
    return str(path)


def small_model(name: str, tmp_path: Path) -> NamedModel:
    return find_model(small(name, tmp_path))


def errors(name: str, tmp_path: Path, suffix: str, **options: Any) -> list[float]:
    if suffix != '.pt2':
        for package in ('onnx', 'onnxscript', 'onnxruntime'):
            pytest.importorskip(package)
    if suffix == '.xml':
        pytest.importorskip('openvino')
    torch.manual_seed(0)
    out = tmp_path / f'model{suffix}'
    # export_model itself refuses what differs by 1e-3.
    found = list(export_model(small_model(name, tmp_path), None, out, size=(64, 96), **options))
    written = {path.suffix for path in tmp_path.iterdir()} - {'.py'}
    assert written == ({'.xml', '.bin'} if suffix == '.xml' else {suffix})
    assert out.stat().st_size > 10_000
    found = [comparison.error for comparison in found]
    # fp32 in another order of sums.
    assert max(found) < 1e-4
    return found


def test_an_onnx_file_is_compared_at_four_batches_and_sizes(tmp_path: Path) -> None:
    assert len(errors('vittt_t_in1k', tmp_path, '.onnx')) == 4


def test_pt2_keeps_the_ops(tmp_path: Path) -> None:
    assert max(errors('vit3_t_in1k', tmp_path, '.pt2')) < 1e-5
    program = torch.export.load(tmp_path / 'model.pt2')
    assert any('ttt_glu' in str(node.target) for node in program.graph.nodes)


def test_pt2_of_an_adapter_for_any_batch(tmp_path: Path) -> None:
    assert max(errors('maskrcnn_vittt_demo', tmp_path, '.pt2', fixed_size=True)) < 1e-5


@pytest.mark.parametrize(
    'name',
    [
        'vit3_t_in1k',
        pytest.param('vittt_t_in1k', marks=pytest.mark.stress),
        pytest.param('hvit3_t_in1k', marks=pytest.mark.stress),
    ],
)
def test_pt2_in_torch_s_own_operators(name: str, tmp_path: Path) -> None:
    errors(name, tmp_path, '.pt2', decompose=True)
    program = torch.export.load(tmp_path / 'model.pt2')
    assert not any('ttt_kernels' in str(node.target) for node in program.graph.nodes)


OTHERS = ('vit3_t_in1k', 'hvit3_t_in1k', 't5_t_in1k_30e', 'maskrcnn_vittt_demo')


@pytest.mark.stress
@pytest.mark.parametrize(
    ('suffix', 'name'),
    [
        *product(('.onnx', '.xml'), (*OTHERS, 'upernet_vittt_t_camvid')),
        ('.onnx', 'deit3_s_linear_in1k_30e'),
        ('.xml', 'vittt_t_in1k'),
    ],
)
def test_other_models_for_onnx_and_openvino(suffix: str, name: str, tmp_path: Path) -> None:
    errors(name, tmp_path, suffix, fixed_size='upernet' in name)


def test_a_difference_in_any_output_counts() -> None:
    image = torch.ones(1, 3, 2, 2)

    def good(run: Any, model: Any = lambda x: (x, 0 * x)) -> bool:
        return compare(model, run, image).good

    assert good(lambda x: [x, 0 * x])
    assert not good(lambda x: [x, x * float('nan')])
    assert not good(lambda x: [x * float('nan'), 0 * x])
    assert not good(lambda x: [x, 0 * x + 1e-3])


def test_what_is_exported_can_be_trained_later() -> None:
    model = find_model('cifar10_vittt_nano').model
    exportable(model)
    assert all(p.requires_grad for p in model.parameters())


ARCH = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=16)
DINO = dict(embed_dim=16, depth=1, num_heads=2)


@pytest.mark.parametrize(
    'build',
    [
        partial(Vittt, ARCH, 'gating', cls_mode='middle', out_type='avg_featmap'),
        partial(T5, ARCH, mixer=dict(neighborhood=3)),
        partial(TimmViT, 'vit_small_patch16_dinov3', model_options=DINO),
    ],
)
def test_one_image_stands_for_all_sizes(
    build: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighborhood, '_GATHERED', 5000)
    model = shaken(build()).eval()
    run = export_module(model, torch.rand(1, 3, 64, 96), tmp_path / 'model.pt2', decompose=True)
    for size in ((64, 96), (112, 80), (33, 250)):
        assert compare(model, run, torch.rand(1, 3, *size)).error < 1e-5


def test_a_model_in_training_mode(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        export_module(torch.nn.Dropout(), torch.rand(2, 3, 8, 8), tmp_path / 'model.pt2')


@pytest.mark.parametrize('size', [(14, 13), (32, 40), (9, 20), (5, 3)])
def test_resizing_as_products(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 14, 13, dtype=torch.float64)
    expected = torch.nn.functional.interpolate(x, size, mode='bicubic', antialias=True)
    torch.testing.assert_close(_resized(x, size, False, None), expected, rtol=0, atol=1e-12)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        next(export_model(find_model('cifar10_vittt_nano'), None, 'model.trt'))
    with pytest.raises(UsageError):
        next(
            export_model(small_model('upernet_vittt_t_camvid', tmp_path), None, tmp_path / 'm.pt2')
        )


class Traced(Exception):
    """Comes in place of a trace, which takes long."""


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.nn.Module, torch.Tensor]]:
    """The networks that would be written, and their example images."""
    seen = []

    def trace(network: torch.nn.Module, image: torch.Tensor, fixed_size: bool) -> None:
        seen.append((network, image))
        raise Traced

    monkeypatch.setattr('mmvttt.deploy.export._trace', trace)
    return seen


def test_a_checkpoint_fills_the_whole_file(tmp_path: Path, untraced: list) -> None:
    config, weights = small('vittt_t_in1k', tmp_path), tmp_path / 'w.pth'
    out, sides = tmp_path / 'm.pt2', ({'model.backbone.img_size': side} for side in (32, 64))
    trained = find_model(config, next(sides)).model
    torch.nn.init.ones_(trained.backbone.pos_embed)
    torch.save(trained.state_dict(), weights)
    # The position embedding of another image size is resized, here and for the analysis tools.
    options = next(sides)
    with pytest.raises(Traced):
        next(export_model(find_model(config, options), weights, out))
    seen = load_model(config, options, str(weights)).model
    for embedding in (untraced[0][0].model.backbone.pos_embed, seen.backbone.pos_embed):
        torch.testing.assert_close(embedding.detach(), torch.ones(1, 16, 64))
    # A head of other classes, and none at all.
    options = {'model.backbone.img_size': 32, 'model.head.num_classes': 7}
    with pytest.raises(CheckpointMismatchError):
        next(export_model(find_model(config, options), weights, out))
    torch.save({f'backbone.{n}': w for n, w in trained.backbone.state_dict().items()}, weights)
    with pytest.raises(CheckpointMismatchError):
        next(export_model(find_model(config), weights, out))


def test_what_is_not_in_the_file_may_be_missing(tmp_path: Path, untraced: list) -> None:
    config, weights = small('maskrcnn_vittt_demo', tmp_path), tmp_path / 'w.pth'
    named = find_model(config)
    inside = {n: w for n, w in named.model.state_dict().items() if 'roi_head' not in n}
    torch.save(inside, weights)
    with pytest.raises(Traced):
        next(export_model(named, weights, tmp_path / 'm.pt2', fixed_size=True))


def test_a_head_that_takes_more_than_features_is_refused() -> None:
    class QueryHead(torch.nn.Module):
        def forward(self, features: Any, batch_data_samples: Any) -> None: ...

    class Segmentor(torch.nn.Module):
        decode_head = QueryHead()

        def extract_feat(self, image: torch.Tensor) -> torch.Tensor:
            return image

    with pytest.raises(UsageError):
        logits_of_segmentor(Segmentor())
