"""Recomputed blocks change nothing, bit for bit, and every parameter gets a gradient."""

import copy

import pytest
import torch
from torch import Tensor, nn

from .building import CASES
from .building import build as build_model

DROP = dict(drop_path_rate=0.5)
BACKBONES = {name: config | DROP for name, config in CASES.items()}
VITTT = BACKBONES['Vittt']
BACKBONES['ViTAdapter'] |= dict(backbone=VITTT)
BACKBONES |= {
    'Vittt with class tokens': VITTT | dict(cls_mode='double', design='conv1d'),
    'ViTAdapter around ViT3': BACKBONES['ViTAdapter']
    | dict(task='seg', backbone=BACKBONES['ViT3']),
}
# Inner trainings that take gradients in the forward pass, or none, with all that may be around.
AROUND = dict(key_norm='instance_center', locality='dwc_v', neighborhood=3, key_position=(4, 4))
BACKBONES |= {
    f'T5, {mixer["inner"]}': BACKBONES['T5'] | dict(mixer=dict(type='TTTMixer', **mixer))
    for mixer in (
        dict(inner='Conv', loss='l1', num_batches=2, epochs=2),
        dict(inner='MLP', loss='smooth_l1', step='dynamic', qk_affine=True, **AROUND),
        dict(inner='GatedFC', loss='rmse', damping=True, step=2.0),
        dict(inner='LinearAttention', **AROUND),
    )
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
    results, kept = [], [0, 0]
    for with_cp in (False, True):

        def keep(x: Tensor, with_cp: bool = with_cp) -> Tensor:
            kept[with_cp] += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            results.append(step(build(name, with_cp), amp))
    plain, recomputed = results
    assert recomputed.keys() == plain.keys()
    # Not one bit: the same kernels run on the same numbers in the same order.
    assert not [key for key, value in plain.items() if not torch.equal(recomputed[key], value)]
    assert any(value.any() for key, value in plain.items() if 'gradient' in key)
    # Recomputed parts keep only their inputs.
    assert kept[True] < 0.7 * kept[False]
