"""The option `backend` of the mixers and of the ViT-Adapter reaches the ops."""

import pytest
import torch

from mmvttt.models.layers import TTTMixer
from ttt_kernels import _backend, _op

from .building import build
from .test_contract import CASES

REFERENCE = dict(backend='reference')
CONFIGS = {name: config for name, (config, _) in CASES.items()}
# Models, and the options by which all of their ops run the reference.
MODELS = {
    **{name: (CONFIGS[name], dict(mixer=REFERENCE)) for name in ('Vittt', 'ViT3', 'HViT3', 'T5')},
    **{
        inner: (CONFIGS['ViT3'] | dict(mixer=mixer), dict(mixer=mixer | REFERENCE))
        for inner in ('GatedFC', 'DWConv', 'MLP')
        for mixer in [dict(type='TTTMixer', inner=inner)]
    },
    'ViTAdapter': (
        CONFIGS['ViTAdapter'] | dict(backbone=CONFIGS['Vittt'] | dict(mixer=REFERENCE)),
        dict(deform_backend='reference'),
    ),
}


@pytest.mark.parametrize('name', MODELS)
def test_a_config_chooses_the_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names Triton, which runs nothing on a CPU, so every op needs the option."""
    monkeypatch.setenv(_backend.VARIABLE, 'triton')
    for op in _op.OPS.values():
        # Of calls in another environment.
        op.plans.clear()
    config, options = MODELS[name]
    image = torch.randn(2, 3, 32, 32)
    with pytest.raises(RuntimeError, match='cannot run here: the tensors are on'):
        build(config).eval()(image)
    assert build(config | options).eval()(image)


def test_a_backend_is_refused_where_no_op_does_the_training() -> None:
    with pytest.raises(ValueError, match=r"backend='reference': no op does this training"):
        TTTMixer(16, 2, 'GatedFC', epochs=2, backend='reference')
