"""Exported files as modules: their shapes, their time beside a model's, threads and copies."""

import copy
import csv
import importlib
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from mmvttt.deploy.export import _write_openvino
from mmvttt.deploy.runtime import ExportedFile, OnnxFile, OpenVINOFile, open_exported
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


def test_a_file_of_any_size_and_one_of_its_own(tmp_path: Path) -> None:
    image = torch.rand(2, 3, 8, 16)
    free = OnnxFile(written(tmp_path / 'free.onnx', 'batch', 3, 'height', 'width'))
    assert (free.names, free.size) == (('twice',), None)
    torch.testing.assert_close(free(image)[0], 2 * image)
    fixed = OnnxFile(written(tmp_path / 'fixed.onnx', 'batch', 3, 8, 16))
    assert fixed.size == (8, 16)
    torch.testing.assert_close(fixed(image)[0], 2 * image)
    for other in (image.mT, image[0]):
        with pytest.raises(UsageError):
            fixed(other)


def test_the_same_files_for_openvino(tmp_path: Path) -> None:
    openvino = pytest.importorskip('openvino')
    image = torch.rand(2, 3, 8, 16)
    for name, shape, size in (
        ('free', ('batch', 3, 'height', 'width'), None),
        ('fixed', ('batch', 3, 8, 16), (8, 16)),
    ):
        model = openvino.convert_model(written(tmp_path / f'{name}.onnx', *shape))
        openvino.save_model(model, tmp_path / f'{name}.xml', compress_to_fp16=False)
        file = open_exported(tmp_path / f'{name}.xml')
        assert (file.names, file.size) == (('twice',), size)
        of_one_shape = OpenVINOFile(file.path, images=image.shape)
        assert of_one_shape.shape == (2, 3, 8, 16)
        torch.testing.assert_close(of_one_shape(image)[0], 2 * image)
        first = file(image)[0]
        torch.testing.assert_close(first, 2 * image)
        # Not a buffer of the runtime's, which the next call would overwrite.
        torch.testing.assert_close(file(3 * image.flip(0))[0], 6 * image.flip(0))
        torch.testing.assert_close(first, 2 * image)
    for fixed in (file, of_one_shape, OpenVINOFile(file.path, images=(2, 3, 16, 8))):
        with pytest.raises(UsageError):
            fixed(image.mT)


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
    openvino = pytest.importorskip('openvino')
    file = written(tmp_path / 'twice.onnx', 'batch', 3, 'height', 'width')
    line = ('resnet18', '--sizes', '32', '--repeats', '2', '--device', 'cpu', '--onnx', file)
    graph = tmp_path / 'twice.xml'
    openvino.save_model(openvino.convert_model(file), graph)
    line += ('--openvino', graph)
    out = tools('benchmark.py', *line, '--out', tmp_path / 'out.csv')
    with (tmp_path / 'out.csv').open(newline='') as table:
        rows = list(csv.DictReader(table))
    names = [row['line'] for row in rows]
    assert names == ['resnet18', 'twice (ONNX Runtime)', 'twice (OpenVINO)']
    assert [row['peak_mib'] == '' for row in rows] == [False, True, True]
    assert all(float(row['latency_ms']) > 0 for row in rows)
    assert 'twice (OpenVINO) inference float32 1 × 32×32' in out
    assert 'for inference' in tools.error('benchmark.py', *line, '--train', status=2)


def test_threads_share_a_file(tmp_path: Path) -> None:
    files: list[ExportedFile] = [
        OnnxFile(written(tmp_path / 'a.onnx', 'batch', 3, 'height', 'width'))
    ]
    if find_spec('openvino'):
        openvino = importlib.import_module('openvino')
        openvino.save_model(openvino.convert_model(files[0].path), tmp_path / 'a.xml')
        files.append(OpenVINOFile(tmp_path / 'a.xml'))
    for file in files:
        images = [torch.full((1, 3, 8, 8), float(n)) for n in range(4)]

        def run(image: Tensor, file: Any = file) -> list[Tensor]:
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
