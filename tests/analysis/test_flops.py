"""FLOPs against the papers' tables, by part and by op; models are found by what they are called."""

import pytest
import torch
from torch import nn

from mmvttt.analysis.flops import count_cost
from mmvttt.by_name import find_model
from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.models import DenseForward
from mmvttt.openmmlab.config import find_config

from ..configs.reduced import build, reduced
from .test_complexity import Prefixed


def cost_of(name: str, size: tuple[int, int] | None = None, **options):
    named = find_model(name, options, weightless=True)
    return count_cost(DenseForward(named.model), size or named.size)


def test_parts_and_ops_add_up() -> None:
    cost = cost_of('upernet_vittt_t_camvid', (128, 160))
    assert sum(cost.by_op.values()) == cost.total_macs
    assert {'ttt_kernels.ttt_linear', 'ttt_kernels.deform_attn'} <= set(cost.by_op)
    parts = {name: (params, macs) for name, params, macs in cost.parts(1)}
    # The auxiliary head does not run at inference.
    assert parts['auxiliary_head'][1] == 0 < parts['auxiliary_head'][0]
    assert sum(params for params, _ in parts.values()) == cost.total_params
    assert sum(macs for _, macs in parts.values()) == cost.total_macs
    deeper = [name for name, *_ in cost.parts(2)]
    assert 'backbone.interactions' in deeper
    inside = ('backbone', 'interactions', 'spatial_prior', 'up', 'norms')
    total = sum(cost.macs[f'backbone.{name}'] for name in inside)
    # Resizing 14×14 positions of 192 channels to 8×10 is two products of matrices.
    assert total + 192 * 8 * 14 * (14 + 10) == cost.macs['backbone']


def test_detectors_are_counted_with_all_regions() -> None:
    cost = cost_of('maskrcnn_vittt_t_1x', (64, 96))
    # 1000 boxes through 7·7·256 × 1024, 1024 × 1024, and 81 + 320 outputs.
    boxes = 1000 * (7 * 7 * 256 * 1024 + 1024 * 1024 + 1024 * (81 + 320))
    assert cost.macs['roi_head.bbox_head'] == boxes
    assert cost.macs['roi_head.mask_head'] > 100 * 4 * 14 * 14 * 256 * 256 * 9
    assert cost.macs['rpn_head'] > 0 < cost.macs['neck']


def test_ops_without_a_formula_are_named() -> None:
    @torch.library.custom_op('mmvttt_test::matmul', mutates_args=())
    def matmul(x: torch.Tensor) -> torch.Tensor:
        return x @ x.mT

    matmul.register_fake(lambda x: x.new_empty(*x.shape[:-1], x.shape[-2]))

    class Network(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return matmul(x)

    cost = count_cost(Network(), (4, 8))
    assert cost.uncounted == ['mmvttt_test.matmul']
    assert cost.total_macs == cost.total_params == 0


def test_names_of_timm_are_not_configs() -> None:
    assert find_model('vittt_tiny_patch16_224').config is None
    assert find_config('resnet18') is None


@pytest.mark.parametrize(
    ('name', 'part', 'idle'),
    [
        ('solov2/solov2_r50_fpn_1x_coco', 'mask_head', []),
        ('panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco', 'semantic_head', []),
        ('condinst/condinst_r50_fpn_ms-poly-90k_coco_instance', 'bbox_head', ['mask_head']),
        ('point_rend/point-rend_r50-caffe_fpn_ms-1x_coco', 'roi_head', ['roi_head.point_head']),
    ],
)
def test_heads_of_mmdet_run_or_are_named(name: str, part: str, idle: list[str]) -> None:
    cost = cost_of(f'mmdet::{name}.py', (64, 64))
    assert cost.macs[part] > 0
    assert cost.idle == idle
    assert all(cost.params[i] > 0 == cost.macs.get(i, 0) for i in idle)


@pytest.mark.parametrize(
    'name', ['dino_hvit3_t_1x', 'mask2former_hvit3_t_1x', 'mask2former_vittt_s_160k']
)
def test_heads_with_transformers(name: str) -> None:
    """They read sizes from tensors, which the meta device has not: it is the CPU that counts."""
    model = build(reduced(name))
    cost = count_cost(DenseForward(model), (64, 96))
    heads = [n for n in cost.macs if n in ('encoder', 'bbox_head', 'panoptic_head', 'decode_head')]
    assert heads
    assert all(cost.macs[n] > 0 for n in (*heads, 'backbone'))
    assert cost.uncounted == []


def test_parts_without_a_parameter_in_use_are_named() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(8, 8)
            self.unused = nn.ModuleDict(dict(first=nn.Linear(8, 8), second=nn.Linear(8, 8)))
            self.unused_too = nn.ModuleList([nn.Linear(8, 8)])
            # Its weight is used, and it is not called.
            self.table = nn.Embedding(2, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x) + self.table.weight[0]

    assert count_cost(Network(), (4, 8)).idle == ['unused', 'unused_too']


def test_parts_without_a_forward_pass_are_refused() -> None:
    """Cascades; Sparse R-CNN's RPN has none either."""
    with pytest.raises(UsageError):
        cost_of('mmdet::sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py', (64, 64))
    with pytest.raises(UsageError):
        count_cost(nn.Sequential(nn.Module()), (64, 64))


def test_a_view_of_a_parameter_may_be_a_module_s_input() -> None:
    """As the queries of mmdet's Deformable DETR are: torch watches inputs that want gradients."""
    assert count_cost(Prefixed(), (32, 32)).total_macs == 5 * 8 * 8
