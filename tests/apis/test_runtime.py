"""Exported files as modules: their shapes, and their time beside a model's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mmvttt.analysis.benchmark import read_csv
from mmvttt.deploy.runtime import OnnxFile
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
    with pytest.raises(UsageError, match=r'these are \(2, 3, 16, 8\): give this shape'):
        fixed(image.mT)


def test_benchmark_times_a_file_beside_a_model(tools: Any, tmp_path: Path) -> None:
    file = written(tmp_path / 'twice.onnx', 'batch', 3, 'height', 'width')
    line = ('resnet18', '--sizes', '32', '--repeats', '2', '--device', 'cpu', '--onnx', file)
    out = tools('benchmark.py', *line, '--out', tmp_path / 'out.csv')
    model, other = read_csv(tmp_path / 'out.csv')
    assert (model.model, other.model) == ('resnet18', 'twice (onnx)')
    assert model.peak_mib is not None
    assert other.peak_mib is None
    assert other.latency_ms is not None
    assert 'twice (onnx) inference float32 1 × 32×32' in out
    assert '--onnx is for inference' in tools.error('benchmark.py', *line, '--train')
