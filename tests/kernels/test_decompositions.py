"""The ops in torch's own operators, which exporters are given, against the references."""

import inner_steps
import pytest
import sampling
import scans
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ttt_kernels import decompositions

# fp64: sums in another order.
TOLERANCE = 1e-12


class Decomposed(TorchDispatchMode):
    """Runs the decompositions in place of the ops, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        instead = decompositions().get(func)
        self.count += instead is not None
        return (instead or func)(*args, **(kwargs or {}))


def agree(call, *args, **kwargs):
    expected = call(*args, **kwargs)
    with Decomposed() as mode, torch.no_grad():
        found = call(*args, **kwargs)
    assert mode.count == 1
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= (TOLERANCE if expected.dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize('ways', ['f', 'b', 'fb'])
@pytest.mark.parametrize('tokens', [1, 15, 16, 35])
def test_the_scan(tokens, ways):
    agree(scans.call, scans.make(tokens, ways), ways)


def test_the_scan_without_token_scale_and_in_half_precision():
    agree(scans.call, {**scans.make(35), 'token_scale': None})
    agree(scans.call, scans.make(35, dtype=torch.bfloat16))


@pytest.mark.parametrize('damping', [True, False])
@pytest.mark.parametrize('hw', [(1, 1), (5, 7)])
def test_the_inner_steps_of_vit3(hw, damping):
    agree(inner_steps.call_glu, inner_steps.make_glu(hw), hw, damping=damping)
    agree(inner_steps.call_dwconv, inner_steps.make_dwconv(hw), hw, damping=damping)


@pytest.mark.parametrize('loss', ['dot', 'l2'])
def test_the_inner_steps_of_t5(loss):
    for make in (inner_steps.make_mlp, inner_steps.make_swiglu):
        agree(inner_steps.call_mlp, make((5, 7)), (5, 7), loss=loss)


@pytest.mark.parametrize('shapes', [((5, 7),), sampling.PYRAMID])
def test_deformable_attention(shapes):
    agree(sampling.call, sampling.make(shapes), shapes)
    agree(sampling.call_fused, sampling.fused(sampling.make(shapes), shapes), shapes)
