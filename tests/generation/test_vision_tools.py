"""Tools for models of photographs name the one for diffusion; diffusers is imported late."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

pytest.importorskip('mmengine')
from mmvttt.analysis.mixers import record_mixers
from mmvttt.openmmlab.registry import MODELS

from .small import model


@pytest.mark.parametrize(
    ('tool', 'options'),
    [
        ('export', ['dit3_digits', '--out', 'a.onnx']),
        ('inspect_model', ['dit3_digits', 'photo.jpg']),
        ('image_demo', ['dit3_digits', 'weights.pth', 'photo.jpg']),
    ],
)
def test_tools_name_tools_generate(
    tool: str, options: list[str], tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new('RGB', (8, 8)).save('photo.jpg')
    error = tools.error(f'{tool}.py', *options)
    assert 'the config has a diffusion model' in error
    assert 'tools/generate.py draws' in error
    assert error.count('\n') == 1
    assert [path.name for path in tmp_path.iterdir()] == ['photo.jpg']


def test_mixers_of_a_diffusion_model_are_recorded() -> None:
    pytest.importorskip('diffusers')
    torch.manual_seed(0)
    network = MODELS.build(model())
    ran = record_mixers(network, torch.randn(2, 1, 8, 12))
    assert [r.name for r in ran] == ['transformer.blocks.0.mixer', 'transformer.blocks.1.mixer']
    assert {r.hw for r in ran} == {(2, 3)}
    assert all(r.x.shape == (2, 6, 24) and r.ops for r in ran)


def test_imports_without_diffusers() -> None:
    code = 'import sys, mmvttt.models, mmvttt.openmmlab.datasets, mmvttt.openmmlab.apis.generate; '
    code += 'assert "diffusers" not in sys.modules'
    subprocess.run([sys.executable, '-c', code], check=True)
