"""Exported files as modules: their shapes, their time beside a model's, threads and copies."""

import copy
import csv
import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from mmvttt.deploy.export import _write_openvino
from mmvttt.deploy.runtime import OpenVINOFile, open_exported
from mmvttt.errors import UsageError

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')


def written(path: Path, *shape: Any) -> Path:
    """A file that computes image + image."""
    tensors = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name in ('image', 'twice')
    ]
    node = onnx.helper.make_node('Add', ['image', 'image'], ['twice'])
    graph = onnx.helper.make_graph([node], 'twice', tensors[:1], tensors[1:])
    opset = onnx.helper.make_opsetid('', 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return path


def converted(file: Path) -> Path:
    """The same for OpenVINO."""
    openvino = pytest.importorskip('openvino')
    graph = file.with_suffix('.xml')
    openvino.save_model(openvino.convert_model(file), graph, compress_to_fp16=False)
    return graph


both = pytest.mark.parametrize('convert', [Path, converted], ids=['onnx', 'openvino'])


@both
def test_a_file_of_any_size_and_one_of_its_own(convert: Callable, tmp_path: Path) -> None:
    image = torch.rand(2, 3, 8, 16)
    for name, shape, size in (
        ('free', ('batch', 3, 'height', 'width'), None),
        ('fixed', ('batch', 3, 8, 16), (8, 16)),
    ):
        file = open_exported(convert(written(tmp_path / f'{name}.onnx', *shape)))
        assert (file.names, file.size) == (('twice',), size)
        first = file(image)[0]
        torch.testing.assert_close(first, 2 * image)
        # Not a buffer of the runtime's, which the next call would overwrite.
        torch.testing.assert_close(file(3 * image.flip(0))[0], 6 * image.flip(0))
        torch.testing.assert_close(first, 2 * image)
        files = [file]
        if convert is converted:
            of_one_shape = OpenVINOFile(file.path, images=image.shape)
            assert of_one_shape.shape == (2, 3, 8, 16)
            torch.testing.assert_close(of_one_shape(image)[0], 2 * image)
            files += [of_one_shape, OpenVINOFile(file.path, images=(2, 3, 16, 8))]
    for fixed in files:
        for other in (image.mT, image[0]):
            with pytest.raises(UsageError):
                fixed(other)


def test_what_is_no_exported_file(tmp_path: Path) -> None:
    for name in ('cut.onnx', 'cut.xml'):
        (tmp_path / name).write_bytes(b'<')
    with pytest.raises(UsageError):
        open_exported(tmp_path / 'cut.onnx')
    with pytest.raises(UsageError):
        open_exported(tmp_path / 'model.pt2')
    pytest.importorskip('openvino')
    with pytest.raises(UsageError):
        open_exported(tmp_path / 'cut.xml')


def test_benchmark_times_files_beside_a_model(tools: Any, tmp_path: Path) -> None:
    file = written(tmp_path / 'twice.onnx', 'batch', 3, 'height', 'width')
    line = ('resnet18', '--sizes', '32', '--repeats', '2', '--device', 'cpu', '--onnx', file)
    line += ('--openvino', converted(file))
    out = tools('benchmark.py', *line, '--out', tmp_path / 'out.csv')
    with (tmp_path / 'out.csv').open(newline='') as table:
        rows = list(csv.DictReader(table))
    names = [row['line'] for row in rows]
    assert names == ['resnet18', 'twice (ONNX Runtime)', 'twice (OpenVINO)']
    assert [row['peak_mib'] == '' for row in rows] == [False, True, True]
    assert all(float(row['latency_ms']) > 0 for row in rows)
    assert 'twice (OpenVINO) inference float32 1 × 32×32' in out
    tools.error('benchmark.py', *line, '--train', status=2)


@both
def test_threads_share_a_file(convert: Callable, tmp_path: Path) -> None:
    file = open_exported(convert(written(tmp_path / 'a.onnx', 'batch', 3, 'height', 'width')))
    images = [torch.full((1, 3, 8, 8), float(n)) for n in range(4)]

    def run(image: Tensor) -> list[Tensor]:
        return [file(image)[0] for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for image, outputs in zip(images, pool.map(run, images), strict=True):
            assert all(torch.equal(output, 2 * image) for output in outputs)
    for copied in (copy.copy(file), copy.deepcopy(file), pickle.loads(pickle.dumps(file))):
        assert torch.equal(copied(images[3])[0], 2 * images[3])


def test_a_stopped_export_leaves_no_graph_with_the_weights_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serialize(_: Any, graph: Path) -> None:
        graph.write_text('new')
        graph.with_suffix('.bin').write_text('new')

    def stop(path: Path, target: Path, replace: Any = os.replace) -> None:
        if (path.suffix, target.name) == ('.partial', 'a.xml'):
            raise KeyboardInterrupt
        replace(path, target)

    openvino = Mock(serialize=serialize)
    monkeypatch.setitem(sys.modules, 'openvino', openvino)
    monkeypatch.setattr(os, 'replace', stop)
    serialize(None, tmp_path / 'a.xml')
    with pytest.raises(KeyboardInterrupt):
        _write_openvino(Mock(), tmp_path / 'a.xml', {})
    assert [path.name for path in tmp_path.iterdir()] == ['a.bin']
