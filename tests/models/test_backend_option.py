"""The option `backend` of the mixers and of the ViT-Adapter: it reaches the ops, and only them."""

import pytest
import torch

from mmvttt.models.layers import TTTMixer
from ttt_kernels import _backend, _op

from .building import build as build_model

ARCH = dict(embed_dims=64, num_layers=1, num_heads=2, feedforward_channels=64)
STAGES = dict(embed_dims=(64, 64), depths=(1, 1), num_heads=(2, 2))
GLU = dict(type='mmvttt.TTTMixer', inner=dict(type='GatedFC'))
VITTT = dict(type='mmvttt.Vittt', arch=ARCH)
ADAPTER = dict(type='mmvttt.ViTAdapter', norm_layer=dict(type='BN'), conv_inplane=8)


def config(model: dict, **mixer: str) -> dict:
    """A model whose mixers have further options."""
    return dict(model, mixer={**model.get('mixer', {}), **mixer})


MODELS_AND_OPS = {
    'Vittt': (VITTT, {'ttt_linear', 'causal_conv'}),
    'ViT3': (dict(type='mmvttt.ViT3', arch=ARCH), {'ttt_glu', 'ttt_dwconv'}),
    'HViT3': (dict(type='mmvttt.HViT3', arch=STAGES), {'ttt_glu', 'ttt_dwconv'}),
    'T5': (dict(type='mmvttt.T5', arch=ARCH), {'ttt_mlp'}),
    'gated heads': (dict(type='mmvttt.ViT3', arch=ARCH, mixer=GLU), {'ttt_glu'}),
    'convolutions': (
        dict(type='mmvttt.ViT3', arch=ARCH, mixer=dict(GLU, inner=dict(type='DWConv'))),
        {'ttt_dwconv'},
    ),
    'two layers': (
        dict(type='mmvttt.ViT3', arch=ARCH, mixer=dict(GLU, inner=dict(type='MLP'))),
        {'ttt_mlp'},
    ),
}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Ops that are called, and their backends; the environment names the other one."""
    calls = set()
    choose = _backend.choose

    def listen(op: str, backend: str, *args: object) -> object:
        calls.add((op, backend))
        return choose(op, backend, *args)

    for op in _op.OPS.values():
        op.plans.clear()  # of calls with these layouts
    monkeypatch.setattr(_backend, 'choose', listen)
    monkeypatch.setenv(_backend.VARIABLE, 'reference')
    return calls


@pytest.mark.parametrize('name', MODELS_AND_OPS)
def test_a_config_chooses_the_backend(name: str, chosen: set) -> None:
    base, ops = MODELS_AND_OPS[name]
    image = torch.randn(2, 3, 32, 32)
    build_model(config(base)).eval()(image)
    assert chosen == {(op, 'reference') for op in ops}
    chosen.clear()
    # No Triton kernel runs here, and nothing else may take its place.
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run here: the tensors are on"):
        build_model(config(base, backend='triton')).eval()(image)
    assert {backend for _, backend in chosen} == {'triton'}


def test_the_adapter_chooses_for_its_attention_alone(
    chosen: set, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_backend.VARIABLE)
    model = build_model(dict(ADAPTER, backbone=VITTT, deform_backend='reference')).eval()
    model(torch.randn(1, 3, 64, 64))
    assert chosen == {('ttt_linear', 'auto'), ('causal_conv', 'auto'), ('deform_attn', 'reference')}


def test_a_backend_is_refused_where_no_op_does_the_training() -> None:
    with pytest.raises(ValueError, match=r"backend='reference': no op does this training"):
        TTTMixer(16, 2, 'GatedFC', epochs=2, backend='reference')
