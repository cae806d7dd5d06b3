"""The stub of `mmcv._ext`: values by hand and by torchvision, gradients, missing operators."""

import math
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import mmcv.ops
import pytest
import torch
import torchvision

from mmvttt.errors import OptionError
from mmvttt.openmmlab.compat import mmcv_ext

BOXES = torch.tensor(
    [[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30], [20, 20, 30, 25], [0, 0, 10, 10]]
)
SCORES = torch.tensor([0.5, 0.9, 0.8, 0.7, 0.4])


@pytest.fixture(autouse=True)
def _without_compiled_mmcv() -> None:
    if not isinstance(sys.modules['mmcv._ext'], mmcv_ext._Stub):
        pytest.skip('mmcv is compiled here: the stub is not used')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_nms_by_hand(dtype: torch.dtype) -> None:
    # IoU(0, 1) = 81 / 119 = 0.68; IoU(2, 3) = 0.5 exactly: kept at 0.5, dropped at 0.49.
    dets, kept = mmcv.ops.nms(BOXES.to(dtype), SCORES.to(dtype), 0.5)
    assert kept.tolist() == [1, 2, 3]
    torch.testing.assert_close(dets[:, 4], SCORES.to(dtype)[kept], rtol=0, atol=0)
    assert mmcv.ops.nms(BOXES.to(dtype), SCORES.to(dtype), 0.49)[1].tolist() == [1, 2]
    assert mmcv.ops.nms(BOXES.to(dtype), SCORES.to(dtype), 0.7)[1].tolist() == [1, 2, 3, 0]


def test_nms_counts_the_last_pixel_with_offset() -> None:
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 4]])
    scores = torch.tensor([0.9, 0.8])
    # Without: 36 / 81 = 0.444; with a pixel more on each side: 50 / 100 = 0.5.
    assert len(mmcv.ops.nms(boxes, scores, 0.47, offset=0)[1]) == 2
    assert len(mmcv.ops.nms(boxes, scores, 0.47, offset=1)[1]) == 1


@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('sampling_ratio', [0, 2])
def test_roi_align_is_torchvision_s(aligned: bool, sampling_ratio: int) -> None:
    torch.manual_seed(0)
    features = torch.randn(3, 3, 15, 17, dtype=torch.float64, requires_grad=True)
    # Inside, whole, smaller than a cell, across two borders, and beyond the map; none in image 1.
    rois = torch.tensor(
        [
            [0, 3.0, 2, 40, 33],
            [2, 0, 0, 68, 60],
            [2, 10, 10, 10.5, 12],
            [0, -30, -9, 20, 90],
            [2, 90, 70, 99, 80],
        ],
        dtype=torch.float64,
    )
    got = mmcv.ops.roi_align(features, rois, (5, 7), 0.25, sampling_ratio, 'avg', aligned)
    want = torchvision.ops.roi_align(features, rois, (5, 7), 0.25, sampling_ratio, aligned)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    do = torch.randn_like(got)
    gradients = (torch.autograd.grad(x, features, do)[0] for x in (got, want))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_roi_align_of_no_boxes_has_no_gradient() -> None:
    features = torch.randn(2, 4, 5, 5, requires_grad=True)
    mmcv.ops.roi_align(features, torch.zeros(0, 5), (2, 2), 1.0, 1).sum().backward()
    assert not features.grad.any()


def test_roi_align_in_bf16_is_that_of_the_rounded_features() -> None:
    torch.manual_seed(0)
    features = torch.randn(1, 3, 12, 12).bfloat16()
    rois = torch.tensor([[0, 4.0, 4, 32, 40]])
    half = features.clone().requires_grad_()
    out = mmcv.ops.roi_align(half, rois.bfloat16(), (3, 3), 0.25, 2, 'avg', True)
    assert out.dtype == torch.bfloat16
    full = features.float().requires_grad_()
    want = torchvision.ops.roi_align(full, rois, (3, 3), 0.25, 2, True)
    out.sum().backward()
    want.sum().backward()
    # One rounding of the result to 8 bits.
    torch.testing.assert_close(out.float(), want, rtol=2**-8, atol=0)
    torch.testing.assert_close(half.grad.float(), full.grad, rtol=2**-8, atol=0)


def test_focal_loss_and_its_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(15, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 5, (15,))  # 4 is the background
    loss = mmcv.ops.sigmoid_focal_loss(logits, target, 2.0, 0.25, None, 'none')
    p = logits.detach().sigmoid()
    hot = torch.nn.functional.one_hot(target, 5)[:, :4].bool()
    want = torch.where(hot, -0.25 * (1 - p) ** 2 * p.log(), -0.75 * p**2 * (1 - p).log())
    torch.testing.assert_close(loss.detach(), want, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(
        lambda x: mmcv.ops.sigmoid_focal_loss(x, target, 2.0, 0.25, None, 'none'), (logits,)
    )


def test_deformable_attention_is_that_of_mmcv_on_a_cpu() -> None:
    from mmcv.ops.multi_scale_deform_attn import (
        MultiScaleDeformableAttnFunction,
        multi_scale_deformable_attn_pytorch,
    )

    torch.manual_seed(0)
    shapes = torch.tensor([[5, 7], [3, 1], [1, 1]])
    starts = torch.tensor([0, 35, 38])
    value = torch.randn(2, 39, 2, 8, dtype=torch.float64)
    # Some lie outside.
    locations = 1.4 * torch.rand(2, 9, 2, 3, 4, 2, dtype=torch.float64) - 0.2
    weights = torch.rand(2, 9, 2, 3, 4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (value, locations, weights)]
    want = multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)
    # Functions that mmcv calls for tensors on a GPU.
    got = MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, 64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(want)
    for x, y in zip(
        torch.autograd.grad(got, leaves, grad),
        torch.autograd.grad(want, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


def test_leaves_a_compiled_mmcv_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / '__init__.py').touch()
    spec = spec_from_file_location(
        'mmcv', tmp_path / '__init__.py', submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(mmcv_ext, 'find_spec', lambda name: spec)
    monkeypatch.setattr(sys, 'modules', {})
    (tmp_path / '_ext.py').touch()
    assert mmcv_ext.offer_stub() == 'mmcv is compiled'
    assert not sys.modules
    (tmp_path / '_ext.py').unlink()
    assert mmcv_ext.offer_stub() is None
    stub = sys.modules['mmcv._ext']
    assert mmcv_ext.offer_stub() is None
    assert sys.modules['mmcv._ext'] is stub


def test_what_is_not_there_says_what_to_do() -> None:
    classes, weights = torch.zeros(2, dtype=torch.long), torch.ones(3)
    with pytest.raises(NotImplementedError):
        mmcv.ops.sigmoid_focal_loss(torch.zeros(2, 3), classes, 2.0, 0.25, weights, 'none')
    with pytest.raises(NotImplementedError):
        mmcv.ops.roi_align(torch.zeros(1, 1, 8, 8), torch.zeros(1, 5), (2, 2), 1.0, 0, 'max')
    with pytest.raises(NotImplementedError):
        mmcv.ops.soft_nms(BOXES, SCORES)
    conv = mmcv.ops.DeformConv2d(4, 4, 3, padding=1)
    with pytest.raises(NotImplementedError):
        conv(torch.zeros(1, 4, 8, 8), torch.zeros(1, 18, 8, 8))


@pytest.mark.parametrize(
    'box', [[1, 0, 0, -math.inf, 9], [2, 0, 0, 9, 9], [-1, 0, 0, 9, 9], [math.nan, 0, 0, 9, 9]]
)
def test_boxes_that_would_end_the_process(box: list[float]) -> None:
    boxes = torch.tensor([[0, 0, 0, 9, 9], box], dtype=torch.float32)
    with pytest.raises(OptionError):
        mmcv.ops.roi_align(torch.ones(2, 16, 8, 8), boxes, (2, 2), 0.5, 2)
