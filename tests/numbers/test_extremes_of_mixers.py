"""Every mixer at loud, faint, zero, equal and constant tokens: finite, and near to fp64.

A mixer stands behind a LayerNorm and never meets such tokens in a model; it must not matter. In
fp16 the tokens between two layers are fp16: where one of them is beyond its range in fp64 too, as
products of tokens of 1e3 are, infinity is right and what follows from it is not checked.
"""

import copy

import pytest
import torch
from mixers import CANCELLING, DIMS, MIXERS, SATURATED, STEPS, function_of, leaves_of
from precision import DEVICES, MAPS, OUTPUT, Reach, Truth, evaluate, largest

EXTREMES = {
    'loud': lambda x: 1e3 * x,
    'faint': lambda x: 1e-6 * x,
    'zero': lambda x: 0 * x,
    'equal': lambda x: x[:, :1].expand_as(x).clone(),
    'constant': torch.ones_like,
}
HALF = torch.float16


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """The fp16 kernels have a smaller range than fp16 tokens; test_triton.py is about them."""
    monkeypatch.setenv('TTT_KERNELS_BACKEND', 'reference')


def prepare(name, tokens, change):
    """The module, its leaves, a gradient of its output, and the fp64 answer with its reach."""
    mixer, hw = MIXERS[name], MAPS[tokens]
    module = mixer.make()
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, 1, tokens, DIMS, generator=generator)
    leaves = leaves_of(module, change(x))
    exact = copy.deepcopy(module).double()
    reach = Reach(exact)
    truth = Truth(function_of(mixer, exact, hw, torch.float64), leaves, 2**-6 * grad)
    met = max(reach.forward, reach.backward, largest(tuple(truth.exact.values())))
    return module, leaves, truth, met


def run(name, tokens, module, leaves, truth, dtype, device):
    function = function_of(MIXERS[name], module.to(device), MAPS[tokens], dtype, device)
    leaves = {n: x.to(device) for n, x in leaves.items()}
    actual = evaluate(function, leaves, truth.grad.float().to(device))
    assert all(x.isfinite().all() for x in actual.values())
    assert actual[OUTPUT].dtype == dtype
    return actual


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('tokens', [1, 63])
@pytest.mark.parametrize('extreme', EXTREMES)
@pytest.mark.parametrize('name', MIXERS)
def test_finite_and_near(name, extreme, tokens, device):
    module, leaves, truth, met = prepare(name, tokens, EXTREMES[extreme])
    if met > torch.finfo(torch.float32).max:
        # Eight steps of 1 on loud tokens leave no number in any type.
        assert (name, extreme) == ('two epochs of four', 'loud')
        return
    for dtype in (torch.float32, torch.bfloat16, HALF):
        if dtype == HALF and met > torch.finfo(HALF).max:
            continue
        actual = run(name, tokens, module, leaves, truth, dtype, device)
        # One loud token is all that its own model is trained on, and what is left of its gradients
        # is the difference of equals; of faint ones fp16 keeps no digits.
        if tokens > 1 and not (dtype == HALF and extreme == 'faint'):
            skip = (*STEPS, *SATURATED.get(name, ())) if extreme == 'loud' else STEPS
            truth.assert_near(actual, dtype, cancelling=CANCELLING, skip=skip)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', MIXERS)
def test_as_loud_as_fits_fp16(name, device):
    for power in range(10, -3, -1):
        prepared = prepare(name, 63, lambda x, factor=2.0**power: factor * x)
        module, leaves, truth, met = prepared
        if met < torch.finfo(HALF).max / 2:
            break
    else:
        raise AssertionError(f'{met} is met for tokens of 1/4')
    actual = run(name, 63, module, leaves, truth, HALF, device)
    skip = (*STEPS, *SATURATED.get(name, ()))
    truth.assert_near(actual, HALF, cancelling=CANCELLING, skip=skip)
