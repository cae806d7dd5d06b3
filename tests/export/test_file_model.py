"""Exported files in the place of a model of OpenMMLab."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import TRANSFORMS

from mmvttt.errors import UsageError
from mmvttt.openmmlab.export import file_model
from mmvttt.openmmlab.export.file_model import ResizeInto, require_same_preparation

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')


# Logits that say "cat", whatever the image.
CAT = """
<ir_version: 10, opset_import: ["": 18]>
cat (float[batch, 3, height, width] image) => (float[batch, 10] logits)
<int64[3] axes = {1, 2, 3}, int64[1] one = {1}, float zero = {0},
 float[10] cat = {0, 0, 0, 5, 0, 0, 0, 0, 0, 0}>
{
    mean = ReduceMean<keepdims = 0>(image, axes)
    none = Mul(mean, zero)
    column = Unsqueeze(none, one)
    logits = Add(column, cat)
}
"""


@pytest.fixture
def cat_file(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(CAT), tmp_path / 'cat.onnx')
    return tmp_path / 'cat.onnx'


def test_image_demo_by_a_file(tools: Any, tmp_path: Path, cat_file: Path) -> None:
    cv2.imwrite(str(tmp_path / 'grey.png'), np.full((40, 50, 3), 128, np.uint8))
    line = ('cifar10_vittt_nano', 'mmvttt://cifar10_vittt_nano', tmp_path / 'grey.png')
    out = tools('image_demo.py', *line, '--onnx', cat_file, '--out', tmp_path / 'out')
    # e⁵ / (e⁵ + 9)
    assert 'cat 0.943; ' in out
    assert (tmp_path / 'out' / 'grey.png').stat().st_size


def test_a_file_is_evaluated(
    tools: Any, tmp_path: Path, cat_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('MMVTTT_DATA', str(tmp_path))
    # Class 3 is "cat": 2 of 11 images.
    for number, label in enumerate((3, *range(10))):
        folder = tmp_path / 'cifar10' / 'test' / f'class{label}'
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f'{number}.png'), np.full((32, 32, 3), 20 * number, np.uint8))
    line = ('cifar10_vittt_nano', 'mmvttt://cifar10_vittt_nano', '--work-dir', tmp_path / 'run')
    out = tools('test.py', *line, '--onnx', cat_file)
    assert 'accuracy/top1: 18.1818' in out
    assert 'leave tta and cuda_graph out (--tta, --cuda-graph)' in tools.error(
        'test.py', *line, '--onnx', cat_file, '--tta'
    )
    said = tools.error('test.py', *line, '--onnx', cat_file, '--amp')
    assert 'not in bfloat16: leave precision out (--amp, --dtype)' in said


def test_a_picture_is_resized_to_the_nearest_pixel() -> None:
    with TRANSFORMS.switch_scope_and_registry('mmdet'):
        resize = ResizeInto(dict(type='Resize'), (64, 64))
    for sides, expected in (((101, 69), (64, 44)), ((69, 101), (44, 64)), ((640, 3), (64, 1))):
        image = np.zeros((*sides, 3), np.uint8)
        assert resize(dict(img=image))['img'].shape[:2] == expected


def test_a_file_is_for_the_images_of_its_export() -> None:
    mean, std = (torch.tensor(x)[:, None, None] for x in ((1.0, 2, 3), (4.0, 5, 6)))
    preprocessor = SimpleNamespace(mean=mean, std=std, _channel_conversion=True)
    good = dict(mean='[1, 2, 3]', std='[4, 5, 6]', bgr_to_rgb='true')
    for notes in (good, {}):
        require_same_preparation(SimpleNamespace(path='a.onnx', notes=notes), preprocessor)
    for wrong in (dict(mean='[0, 2, 3]'), dict(mean='null'), dict(bgr_to_rgb='false')):
        file = SimpleNamespace(path='a.onnx', notes={**good, **wrong})
        with pytest.raises(UsageError):
            require_same_preparation(file, preprocessor)


NOTES = {
    'mean': ('x', '{}', '["a"]', '[' * 10**5, '[[1], [2, 3]]'),
    'picture_size': ('x', '"ab"', '[0, 0]', '[-5, 9]', '[65, 64]', '[64]', '5'),
    'classes': ('5', 'x', '["b", "a"]', '["a", "b", "c"]'),
}


@pytest.mark.parametrize('name', NOTES)
def test_notes_of_a_stranger_are_an_error_of_usage(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in NOTES[name]:
        file = SimpleNamespace(path='a.onnx', notes={name: text}, size=(64, 64))
        monkeypatch.setattr(file_model, 'open_exported', lambda *_, file=file: file)
        with pytest.raises(UsageError, match=r'a\.onnx'):
            file_model.open_for('a.onnx', [], classes=['a', 'b'])
