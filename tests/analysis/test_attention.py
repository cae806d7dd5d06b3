"""Closed forms of implicit attention against autograd; key shift and distance by hand."""

import copy
import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from mmvttt.analysis.attention import (
    attention_distance,
    implicit_attention,
    inspect_layers,
    key_shift,
)
from mmvttt.models.backbones import T5, ViT3
from mmvttt.models.layers import TTTMixer, neighborhood_attention
from mmvttt.models.layers.neighborhood import neighborhood_weights

HW = (2, 3)
TOOL = Path(__file__).resolve().parents[2] / 'tools' / 'inspect_attention.py'


def mixer(kind: str, **options) -> TTTMixer:
    torch.manual_seed(0)
    module = TTTMixer(8, 2, dict(type=kind), **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module


def jacobians(module: TTTMixer, x: Tensor, hw: tuple[int, int]) -> Tensor:
    """∂o_i/∂v_j by autograd through the mixer, without proj, `(B, H, N, N, d, d)`."""
    q, k, v = module.qkv(x).detach().chunk(3, dim=-1)
    module = copy.deepcopy(module)
    module.proj = torch.nn.Identity()

    def read(v: Tensor) -> Tensor:
        module.qkv.forward = lambda _: torch.cat([q, k, v.flatten(2)], dim=-1)
        return module(x, hw).unflatten(-1, module.heads)

    full = torch.autograd.functional.jacobian(read, v.unflatten(-1, module.heads))
    # (b, i, h, a, b, j, h, c), of which images and heads do not mix.
    return torch.einsum('nihanjhc->nhijac', full)


def check_against_autograd(module: TTTMixer, hw: tuple[int, int] = HW) -> None:
    x = torch.randn(2, hw[0] * hw[1], 8, dtype=torch.float64)
    expected = jacobians(module, x, hw)
    found = implicit_attention(module, x, hw)
    trace = expected.diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(found.trace, trace)
    torch.testing.assert_close(found.norm, expected.flatten(-2).norm(dim=-1) / 2)


KINDS = ['SwiGLU', 'GatedFC', 'MLP', 'LinearAttention', 'SoftmaxAttention']


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('locality', [None, 'dwc_qk', 'dwc_v'])
def test_closed_forms_are_autograds(kind: str, locality: str | None) -> None:
    check_against_autograd(mixer(kind, key_norm='instance', locality=locality))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('locality', ['dwc_qk', 'dwc_v'])
def test_neighbours_count_too(kind: str, locality: str) -> None:
    check_against_autograd(
        mixer(kind, key_norm='instance', locality=locality, neighborhood=3), (4, 3)
    )


def test_weights_of_neighbours_read_the_values() -> None:
    """At borders too, where the window is shifted."""
    q, k, v = torch.randn(3, 2, 20, 2, 4, dtype=torch.float64)
    weights = neighborhood_weights(q, k, (4, 5), 3)
    assert ((weights > 0).sum(-1) == 9).all()
    read = torch.einsum('bhij,bjhd->bihd', weights, v)
    torch.testing.assert_close(read, neighborhood_attention(q, k, v, (4, 5), 3))


def test_of_softmax_it_is_the_attention_matrix() -> None:
    module = mixer('SoftmaxAttention')
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    found = implicit_attention(module, x, HW)
    torch.testing.assert_close(found.norm.sum(-1), torch.ones(1, 2, 6, dtype=torch.float64))
    v = module.qkv(x)[..., 16:].unflatten(-1, (2, 4)).transpose(1, 2)
    read = module.proj((found.trace @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(read, module(x, HW))


def test_key_shift_by_hand() -> None:
    k = torch.tensor([[1, -1], [0.5, 2], [-1.5, 0], [2, 1]], dtype=torch.float64)
    assert key_shift(k).item() == pytest.approx(0.3921924696, abs=1e-9)
    assert key_shift(k - k.mean(0)).item() == pytest.approx(0, abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    independent = key_shift(torch.randn(64, 196, 64, generator=generator)).mean()
    assert independent.item() == pytest.approx(196**-0.5, rel=0.02)


def test_distance_by_hand() -> None:
    itself, uniform = torch.eye(6), torch.full((6, 6), -1 / 6)
    assert attention_distance(itself, HW).item() == 0
    places = [(r, c) for r in range(2) for c in range(3)]
    apart = [((a - c) ** 2 + (b - d) ** 2) ** 0.5 for a, b in places for c, d in places]
    assert attention_distance(uniform, HW).item() == pytest.approx(sum(apart) / 36)


def test_every_layer_of_a_model() -> None:
    arch = dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32)
    model = T5(arch, dict(neighborhood=3), img_size=48).train()
    found = inspect_layers(model, torch.randn(2, 3, 48, 33))
    assert [layer.name for layer in found] == [f'blocks.{i}.mixer' for i in range(3)]
    assert model.training
    for layer in found:
        assert layer.hw == (3, 3)
        assert layer.key_shift.shape == (2,)
        assert layer.attention.norm.shape == (2, 2, 9, 9)
        assert (layer.attention.trace.abs() <= layer.attention.norm + 1e-6).all()
    with pytest.raises(ValueError, match='ViT3 has no TTTMixer'):
        inspect_layers(ViT3(arch), torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('SwiGLU', dict(loss='l2')),
        ('SwiGLU', dict(step=0.5)),
        ('SwiGLU', dict(damping=True)),
        ('SoftmaxAttention', dict(key_position=HW)),
    ],
)
def test_what_has_no_closed_form_is_refused(kind: str, options: dict) -> None:
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match='no closed form'):
        implicit_attention(mixer(kind, **options), x, HW)


def test_the_tool_draws_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    config = tmp_path / 'small.py'
    arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
    config.write_text(f"model = dict(type='mmvttt.T5', arch={arch!r}, img_size=64)\n")
    image = np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / 'image.png'), image)
    arguments = [str(config), str(tmp_path / 'image.png'), '--out', str(tmp_path / 'out')]
    arguments = ['inspect_attention.py', *arguments, '--shape', '64', '96']
    monkeypatch.setattr(sys, 'argv', arguments)
    runpy.run_path(str(TOOL), run_name='__main__')
    assert 'blocks.1.mixer' in capsys.readouterr().out
    lines = (tmp_path / 'out' / 'layers.csv').read_text().splitlines()
    assert lines[0] == 'layer,key_shift,distance'
    assert len(lines) == 3
    assert cv2.imread(str(tmp_path / 'out' / 'image.png')) is not None
    alone = cv2.imread(str(tmp_path / 'out' / 'layers.png'))
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'layers.csv').write_text('layer,key_shift,distance\na,0.5,2\nb,0.4,nan\n')
    monkeypatch.setattr(sys, 'argv', [*arguments, '--beside', str(tmp_path / 'other')])
    runpy.run_path(str(TOOL), run_name='__main__')
    assert not np.array_equal(alone, cv2.imread(str(tmp_path / 'out' / 'layers.png')))
    monkeypatch.setattr(sys, 'argv', [*arguments, '--beside', str(tmp_path / 'nowhere')])
    with pytest.raises(SystemExit):
        runpy.run_path(str(TOOL), run_name='__main__')
    assert 'nowhere/layers.csv' in capsys.readouterr().err
