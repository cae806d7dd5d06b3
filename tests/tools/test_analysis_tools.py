"""The command lines of the tools that look at models: help with an example, and one real call."""

import re
import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from mmvttt.models.cpu_inference import is_worthwhile

TOOLS = Path(__file__).resolve().parents[2] / 'tools'
NAMES = (
    'analyze_results.py',
    'benchmark.py',
    'browse_dataset.py',
    'checkpoint_info.py',
    'get_flops.py',
    'export.py',
    'get_memory.py',
    'gradio_demo.py',
    'image_demo.py',
    'inherit_weights.py',
    'inspect_model.py',
    'make_model_zoo.py',
    'publish_checkpoint.py',
)


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str, *args: str
) -> str:
    """The output of a tool that ends well."""
    monkeypatch.setattr(sys, 'argv', [tool, *args])
    runpy.run_path(str(TOOLS / tool), run_name='__main__')
    return capsys.readouterr().out


@pytest.mark.parametrize('tool', NAMES)
def test_help_shows_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, capsys, tool, '--help')
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f'example: python tools/{tool}' in text
    # Whatever takes a value or changes something is documented.
    assert 'optional arguments' in text or 'options:' in text


def test_get_flops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(monkeypatch, capsys, 'get_flops.py', 'vittt_t_in1k', '--depth', '1')
    assert re.search(r'backbone +│ 6,783,240 +│ 1\.459', out)
    assert 'ttt_kernels.ttt_linear' in out
    assert 'vittt_t_in1k at 224×224: 6.976 M parameters, 1.459 GFLOPs' in out
    shape = ('--shape', '225', '333')
    assert '225×333' in run(monkeypatch, capsys, 'get_flops.py', 'vittt_t_in1k', *shape)
    four = ('--cfg-options', 'model.backbone.in_channels=4')
    assert '7.025 M' in run(monkeypatch, capsys, 'get_flops.py', 'vittt_t_in1k', *four)
    out = run(monkeypatch, capsys, 'get_flops.py', 'vittt_t_in1k', '--backbone')
    assert '6.783 M parameters, 1.459 GFLOPs' in out


def test_get_flops_names_what_did_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ('get_flops.py', 'upernet_hvit3_t_160k', '--shape', '64', '64')
    assert 'found in the image: auxiliary_head\n' in run(monkeypatch, capsys, *args)
    assert 'found in the image' not in run(monkeypatch, capsys, *args, '--backbone')


def test_an_unknown_model_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, capsys, 'get_flops.py', 'vittt_xxl')
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: there is no model 'vittt_xxl'")
    assert len(error.splitlines()) == 1


def test_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table, picture = tmp_path / 'rows.csv', tmp_path / 'rows.png'
    options = ('--sizes', '32', '48', '--repeats', '1', '--warmup', '0', '--device', 'cpu')
    out = run(
        monkeypatch,
        capsys,
        'benchmark.py',
        'vittt_tiny_patch16_224',
        *options,
        *('--cfg-options', 'in_chans=4'),
        *('--out', str(table), '--plot', str(picture)),
    )
    assert 'vittt_tiny inference float32 1 × 48×48:' in out
    assert 'GFLOPs' in out
    assert '(compiled)' not in out
    assert len(table.read_text().splitlines()) == 3
    assert picture.is_file()


def test_benchmark_by_computation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table, picture = tmp_path / 'rows.csv', tmp_path / 'rows.png'
    models = ('t5_tiny_patch16_224', 'deit_tiny_patch16_224')
    out = run(
        monkeypatch,
        capsys,
        'benchmark.py',
        *models,
        *('--sizes', '224', '512', '--attention', 'fused', 'materialised', '--computed'),
        *('--dtype', 'float32', 'bfloat16', '--out', str(table)),
    )
    # t5_crossing() is at 276 pixels; DeiT's class token costs it a little more.
    found = re.search(r'FLOPs: t5_tiny, float32 needs less than deit_tiny .* from (\d+)×', out)
    assert int(found[1]) == pytest.approx(276, abs=4)
    assert len(table.read_text().splitlines()) == 1 + 2 * 2 + 2 * 2 * 2
    draw = ('--draw', str(table), '--names', 'plain', '--plot', str(picture))
    run(monkeypatch, capsys, 'benchmark.py', *draw)
    assert picture.is_file()
    detector = ('maskrcnn_vittt_t_1x', '--shape', '100', '140', '--backbone', '--computed')
    out = run(monkeypatch, capsys, 'benchmark.py', *detector, '--out', str(table))
    assert '1 × 100×140:' in out
    for options, message in (
        (models + draw, 'give models to measure, or tables to --draw'),
        (draw[:2], 'say with --plot'),
        (('--draw', str(tmp_path / 'no.csv'), '--plot', 'x.png'), 'no table of tools/benchmark.py'),
    ):
        with pytest.raises(SystemExit, match='1'):
            run(monkeypatch, capsys, 'benchmark.py', *options)
        assert message in capsys.readouterr().err


@pytest.mark.stress  # compiles C++ for a minute
def test_benchmark_of_compiled_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ('--sizes', '32', '--repeats', '1', '--compile', '--out', str(tmp_path / 'rows.csv'))
    out = run(monkeypatch, capsys, 'benchmark.py', 'vit3_tiny_patch16_224', *options)
    for name in ('vit3_tiny_patch16_224', 'vit3_tiny_patch16_224 (compiled)'):
        assert f'{name.replace("_patch16_224", "")} inference float32 1 × 32×32:' in out


def test_benchmark_of_packed_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ('--out', str(tmp_path / 'rows.csv'))
    options = ('vit3_tiny_patch16_224', '--sizes', '32', '--repeats', '1', '--device', 'cpu')
    with pytest.raises(SystemExit, match='1'):
        run(monkeypatch, capsys, 'benchmark.py', *options, '--pack', '--train', *out)
    assert '--pack is for inference' in capsys.readouterr().err
    if not is_worthwhile():
        pytest.skip('this processor has no AVX-512, or this torch no oneDNN')
    text = run(monkeypatch, capsys, 'benchmark.py', *options, '--pack', *out)
    for name in ('vit3_tiny', 'vit3_tiny (packed)'):
        assert f'{name} inference float32 1 × 32×32:' in text


def test_keys_of_configs_are_none_of_timm_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ('--sizes', '32', '--repeats', '1', '--warmup', '0', '--device', 'cpu')
    out = ('--out', str(tmp_path / 'rows.csv'))
    key = ('--cfg-options', 'model.head.num_classes=10')
    models = ('resnet18', 'hvit3_t_in1k')
    text = run(monkeypatch, capsys, 'benchmark.py', *models, *options, *out, *key)
    assert all(f'{model} inference float32 1 × 32×32' in text for model in models)
    for options, message in (
        (key, "resnet18 is a model of timm, and 'model.head.num_classes' a key of configs"),
        (('--cfg-options', 'nonsense=1'), "argument 'nonsense'"),
    ):
        with pytest.raises(SystemExit, match='1'):
            run(monkeypatch, capsys, 'benchmark.py', 'resnet18', *options, *out)
        assert message in capsys.readouterr().err


def test_image_demo_and_browse_dataset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for folder, color in (('a', 0), ('b', 200)):
        (tmp_path / 'train' / folder).mkdir(parents=True)
        image = np.full((40, 40, 3), color, np.uint8)
        cv2.imwrite(str(tmp_path / 'train' / folder / '0.png'), image)
    config = tmp_path / 'config.py'
    config.write_text(f"""
_base_ = 'mmvttt::vittt_t_in1k.py'
model = dict(
    backbone=dict(arch=dict(
        _delete_=True, embed_dims=32, num_layers=1, num_heads=1, feedforward_channels=32)),
    head=dict(in_channels=32, num_classes=2))
data_preprocessor = dict(num_classes=2)
train_dataloader = dict(dataset=dict(
    _delete_=True, type='CustomDataset', data_root={str(tmp_path)!r}, data_prefix='train',
    pipeline=_base_.train_pipeline))
""")
    out = run(
        monkeypatch, capsys, 'browse_dataset.py', str(config), '--out', str(tmp_path / 'drawn')
    )
    assert '2 pictures' in out
    assert len(list((tmp_path / 'drawn').glob('*.png'))) == 2

    # Views of an image, to learn from without labels, side by side.
    views = tmp_path / 'views.py'
    views.write_text(f"""
_base_ = {str(config)!r}
crop, small = ([dict(type='RandomResizedCrop', scale=scale)] for scale in (32, 20))
train_dataloader = dict(dataset=dict(pipeline=[
    dict(type='LoadImageFromFile'),
    dict(type='MultiView', num_views=[2, 1], transforms=[crop, small]),
    dict(type='PackInputs')]))
""")
    run(monkeypatch, capsys, 'browse_dataset.py', str(views), '--out', str(tmp_path / 'views'))
    picture = cv2.imread(str(tmp_path / 'views' / '00000.png'))
    assert picture.shape == (32, 84, 3)
    assert (picture[20:, 64:] == 255).all()

    from mmvttt.analysis.models import find_model

    weights = tmp_path / 'w.pth'
    meta = dict(dataset_meta=dict(classes=('a', 'b')))
    torch.save(dict(state_dict=find_model(str(config)).model.state_dict(), meta=meta), weights)
    photo = tmp_path / 'train' / 'b' / '0.png'
    demo = (str(config), str(weights), '--out', str(tmp_path / 'o'), '--device', 'cpu', str(photo))
    out = run(monkeypatch, capsys, 'image_demo.py', *demo)
    assert re.search(r'0\.png: [ab] 0\.\d+; [ab] 0\.\d+ → .*0\.png', out)

    # The same file, published, and described.
    out = run(monkeypatch, capsys, 'publish_checkpoint.py', str(weights), str(tmp_path / 'zoo.pth'))
    published = Path(out.split(':')[0])
    assert published.is_file()
    page = run(monkeypatch, capsys, 'checkpoint_info.py', str(published), '--depth', '1')
    assert '2 classes: a, b' in page
