"""mmdet's and mmseg's own heads with transformers, on our operator."""

import copy
from pathlib import Path

import pytest
import torch
from mmcv.ops import MultiScaleDeformableAttention, multi_scale_deform_attn
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.optim import build_optim_wrapper
from torch import nn

from mmvttt.analysis.flops import count_cost
from mmvttt.openmmlab.analysis.models import DenseForward

from .reduced import batch_for, build, reduce_model

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
OWN = {
    'Deformable DETR': 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    'DINO': 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py',
    'Mask2Former': 'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
    'Mask2Former of mmseg': 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py',
}


def of_step(model: nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    """The loss of a training step, and the gradient of every parameter."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss, _ = model.parse_losses(model(**batch, mode='loss'))
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {'loss': loss.detach(), **grads}


@pytest.mark.parametrize('name', OWN)
def test_models_of_the_toolboxes_step_on_our_operator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mmcv runs its grid sampling on a CPU, and on a GPU the operator that we bring."""
    cfg = reduce_model(get_config(OWN[name]))
    model = build(cfg)
    model.init_weights()
    attentions = [m for m in model.modules() if isinstance(m, MultiScaleDeformableAttention)]
    assert attentions
    for attention in attentions:
        # They begin at 0, where queries do not move the places.
        nn.init.normal_(attention.sampling_offsets.weight, std=0.05)
        nn.init.normal_(attention.attention_weights.weight, std=0.05)
    batch = model.train().data_preprocessor(batch_for(cfg), training=True)
    expected = of_step(model, batch)
    calls = []

    def operator(value, shapes, places, weights):
        starts = torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))
        calls.append(tuple(places.shape))
        return MultiScaleDeformableAttnFunction.apply(value, shapes, starts, places, weights, 64)

    monkeypatch.setattr(multi_scale_deform_attn, 'multi_scale_deformable_attn_pytorch', operator)
    found = of_step(model, copy.deepcopy(batch))
    assert len(calls) == len(attentions)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # fp32, its sums in another order; relative to the tensor.
        assert (found[key] - value).norm() <= 1e-3 * value.norm() + 1e-7, key
    optim = build_optim_wrapper(model, cfg.optim_wrapper)
    before = attentions[0].sampling_offsets.weight.detach().clone()
    optim.step()
    assert not torch.equal(before, attentions[0].sampling_offsets.weight)


@pytest.mark.parametrize(
    'name', ['dino_hvit3_t_1x', 'mask2former_hvit3_t_1x', 'mask2former_vittt_s_160k']
)
def test_flops_of_heads_with_transformers(name: str) -> None:
    """They read sizes from tensors, which the meta device has not: it is the CPU that counts."""
    model = build(reduce_model(Config.fromfile(CONFIGS / f'{name}.py')))
    cost = count_cost(DenseForward(model), (64, 96))
    heads = [n for n in cost.macs if n in ('encoder', 'bbox_head', 'panoptic_head', 'decode_head')]
    assert heads
    assert all(cost.macs[n] > 0 for n in (*heads, 'backbone'))
    assert cost.total_params == sum(p.numel() for p in model.parameters())
    assert cost.uncounted == []
