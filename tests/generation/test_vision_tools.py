"""Tools for models of photographs say in one sentence what does their work for diffusion."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

pytest.importorskip('mmengine')
from mmvttt.analysis.mixers import record_mixers
from mmvttt.openmmlab.registry import MODELS

from .small import model

pytest.importorskip('diffusers')

TOOLS = Path(__file__).resolve().parents[2] / 'tools'


@pytest.mark.parametrize(
    ('tool', 'options'),
    [
        ('export', ['dit3_digits', '--out', 'a.onnx']),
        ('inspect_model', ['dit3_digits', 'photo.jpg']),
        ('image_demo', ['dit3_digits', 'weights.pth', 'photo.jpg']),
    ],
)
def test_tools_name_what_does(
    tool: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('sys.argv', [tool, *options])
    spec = spec_from_file_location(f'{tool}_tool', TOOLS / f'{tool}.py')
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit):
        module.main()
    error = capsys.readouterr().err
    assert 'the config has a diffusion model' in error
    assert 'tools/generate.py draws' in error
    assert error.count('\n') == 1
    assert not list(tmp_path.iterdir())


def test_mixers_of_a_diffusion_model_are_recorded() -> None:
    torch.manual_seed(0)
    network = MODELS.build(model())
    ran = record_mixers(network, torch.randn(2, 1, 8, 12))
    assert [r.name for r in ran] == ['transformer.blocks.0.mixer', 'transformer.blocks.1.mixer']
    assert {r.hw for r in ran} == {(2, 3)}
    assert all(r.x.shape == (2, 6, 24) and r.ops for r in ran)
