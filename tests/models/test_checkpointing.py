"""Recomputed blocks change nothing, bit for bit, and every parameter gets a gradient.

Points of the design space too, whose inner training takes gradients in the forward pass.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from mmvttt.models.layers.inner_losses import INNER_LOSSES
from mmvttt.models.layers.key_norms import KEY_NORMS

from .building import build as build_model
from .test_contract import CASES

DROP = dict(drop_path_rate=0.5)
BACKBONES: dict[str, dict] = {name: config | DROP for name, (config, _) in CASES.items()}
VITTT = BACKBONES['Vittt']
BACKBONES['ViTAdapter'] |= dict(backbone=VITTT)
BACKBONES |= {
    'Vittt with class tokens': VITTT | dict(cls_mode='double', design='conv1d'),
    'ViTAdapter around ViT3': BACKBONES['ViTAdapter']
    | dict(task='seg', backbone=BACKBONES['ViT3']),
}
every_backbone = pytest.mark.parametrize('name', BACKBONES)


def build(name: str, with_cp: bool) -> nn.Module:
    config = copy.deepcopy(BACKBONES[name]) | dict(with_cp=with_cp)
    if 'backbone' in config:
        config['backbone']['with_cp'] = with_cp
    torch.manual_seed(0)
    return build_model(config).train()


def step(model: nn.Module, amp: bool) -> dict[str, Tensor]:
    """Everything that a step makes: outputs, gradients, buffers, and the random numbers after."""
    torch.manual_seed(1)
    with torch.autocast('cpu', torch.bfloat16, enabled=amp):
        outs = model(torch.randn(3, 3, 64, 80))
    sum((out.float() * torch.linspace(-1, 1, out.shape[-1])).mean() for out in outs).backward()
    made = {f'output {i}': out.detach() for i, out in enumerate(outs)}
    made |= {f'gradient of {n}': p.grad for n, p in model.named_parameters()}
    return made | dict(model.named_buffers()) | {'random numbers': torch.rand(8)}


@every_backbone
@pytest.mark.parametrize('amp', [False, True], ids=['fp32', 'bf16'])
def test_outputs_gradients_and_statistics_are_the_same(name: str, amp: bool) -> None:
    plain, recomputed = (step(build(name, with_cp), amp) for with_cp in (False, True))
    assert recomputed.keys() == plain.keys()
    # Not one bit: the same kernels run on the same numbers in the same order.
    assert not [key for key, value in plain.items() if not torch.equal(recomputed[key], value)]
    assert any(value.any() for key, value in plain.items() if 'gradient' in key)


@every_backbone
def test_less_is_kept_for_the_backward_pass(name: str) -> None:
    """Recomputed parts keep only their inputs."""
    kept = []
    for with_cp in (False, True):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            build(name, with_cp)(torch.randn(3, 3, 64, 80))
        kept.append(sum(sizes))
    assert kept[1] < 0.7 * kept[0]


SMALL = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=16)
# Points of the papers' ablations (docs/own_config.md): options of a TTTMixer.
ROWS = [
    *(dict(loss=loss) for loss in INNER_LOSSES),
    *(dict(inner=inner, loss='l1') for inner in ('GatedFC', 'Conv', 'DWConv')),
    dict(inner=dict(type='MLP', depth=3, residual='input'), neighborhood=3),
    dict(num_batches=2, epochs=2, loss='l2'),
    dict(step='dynamic'),
    dict(damping=True, loss='l2'),
    dict(key_position=(4, 4), step=2.0),
    dict(inner=dict(type='LinearAttention', project=True)),
    dict(inner=dict(type='SoftmaxAttention')),
    *(dict(key_norm=norm, loss='l1') for norm in KEY_NORMS),
    *(dict(locality=locality, loss='l1') for locality in ('dwc_v', 'dwc_qk')),
]


@pytest.mark.parametrize('row', ROWS, ids=lambda row: '-'.join(map(str, row.values())))
def test_a_point_of_the_design_space_can_be_recomputed(row: dict) -> None:
    mixer = dict(type='mmvttt.TTTMixer', inner=dict(type='SwiGLU')) | row
    results = []
    for with_cp in (False, True):
        torch.manual_seed(0)
        config = dict(type='mmvttt.ViT3', arch=SMALL, mixer=mixer, with_cp=with_cp)
        model = build_model(config).double().train()
        x = torch.randn(2, 3, 48, 64, dtype=torch.float64)
        out = model(x)[-1]
        out.sin().mean().backward()
        results.append([out, *(p.grad for p in model.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        # The same kernels on the same numbers, in fp64.
        torch.testing.assert_close(recomputed, plain, rtol=1e-12, atol=0)
