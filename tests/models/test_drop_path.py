"""Stochastic depth with its rate in a tensor."""

import pytest
import torch

from mmvttt.models.layers.drop_path import DropPath


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_whole_samples_are_dropped_and_the_mean_stays(dtype):
    torch.manual_seed(0)
    x = torch.ones(4096, 3, 2, dtype=dtype, requires_grad=True)
    drop = DropPath(0.25)
    y = drop(x)
    assert y.dtype == dtype
    values = y.detach().flatten(1)
    assert (values == values[:, :1]).all()
    kept = torch.tensor(1 / 0.75, dtype=dtype)
    assert set(values[:, 0].tolist()) == {0.0, kept.item()}
    assert values.float().mean().item() == pytest.approx(1, abs=0.05)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_nothing_is_dropped_in_a_test_or_without_a_rate():
    x = torch.ones(64, 3)
    assert DropPath(0.5).eval()(x) is x
    assert DropPath(0.0).train()(x) is x
    assert not DropPath(0.5).state_dict()


def test_the_rate_survives_a_start_without_memory():
    """A model is built on the meta device, gets memory, and loads its weights."""
    with torch.device('meta'):
        drop = DropPath(0.25)
    drop = drop.to_empty(device='cpu')
    drop.load_state_dict(drop.state_dict())
    assert drop.keep == 0.75
    assert drop.half().keep == 0.75


def test_the_rate_survives_weights_that_are_assigned():
    with torch.device('meta'):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), DropPath(0.75))
    model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(2, 2)).state_dict(), assign=True)
    torch.nn.init.zeros_(model[0].weight)
    torch.nn.init.ones_(model[0].bias)
    assert set(model(torch.ones(4096, 2)).unique().tolist()) == {0.0, 4.0}


def test_the_rate_can_be_set_later():
    """As schedules of stochastic depth do; it changed the attribute alone."""
    drop = DropPath(0.0)
    drop.drop_prob = 0.75
    assert drop.keep == 0.25
    y = drop(torch.ones(4096, 1))
    assert set(y.unique().tolist()) == {0.0, 4.0}
    drop.drop_prob = 0.0
    assert drop(y) is y
