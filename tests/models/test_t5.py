"""T⁵: a worked example of its step, its key norms and neighborhoods, and what is new in it."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from mmvttt.models.backbones import T5
from mmvttt.models.layers import TTTMixer, neighborhood
from mmvttt.models.layers.key_norms import KEY_NORMS, instance
from mmvttt.models.layers.neighborhood import neighborhood_attention

from .building import SOFTMAX
from .published import neighborhoods

# An inner model, as a function.
FUNCTIONS = [
    ('SwiGLU', lambda x, w1, w2, w3: (F.silu(x @ w1) * (x @ w2)) @ w3),
    ('SiLUFC', lambda x, w1: F.silu(x @ w1)),
    ('MLP', lambda x, w1, w2: F.silu(x @ w1) @ w2),
    (dict(type='MLP', depth=3), lambda x, w1, w2, w3: F.silu(F.silu(x @ w1) @ w2) @ w3),
    (dict(type='MLP', residual='input'), lambda x, w1, w2: x + F.silu(x @ w1) @ w2),
    (dict(type='MLP', residual='weight'), lambda x, w1, w2: F.silu(x @ w1) @ (w2 + torch.eye(4))),
]


@pytest.mark.parametrize('loss', ['dot', 'l2'])
@pytest.mark.parametrize(('inner', 'function'), FUNCTIONS)
def test_a_step_of_one_head(inner: str | dict, function: Callable, loss: str) -> None:
    mixer = TTTMixer(4, 1, inner, loss=loss).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    q, k, v = mixer.qkv(x)[0].chunk(3, -1)
    weights = [w[0] for w in mixer.inner.parameters()]
    output = function(k, *weights)
    # Σ over channels, mean over tokens, times 1/√d.
    error = -(output * v).sum() if loss == 'dot' else (output - v).square().sum() / 2
    steps = torch.autograd.grad(error / (6 * 4**0.5), weights)
    expected = function(q, *(w - step for w, step in zip(weights, steps, strict=True)))
    fused = mixer.fused
    for mixer.fused in {fused, False}:
        torch.testing.assert_close(mixer(x, (2, 3))[0], mixer.proj(expected))


def test_key_norms_are_torchs() -> None:
    k = torch.randn(2, 15, 8, dtype=torch.float64) + 1
    expected = {
        'instance': F.instance_norm(k.mT, eps=1.0).mT,
        'layer': F.layer_norm(k, (8,), eps=1e-6),
        'instance_center': k - k.mean(1, keepdim=True),
        'instance_scale': k / (k.var(1, correction=0, keepdim=True) + 1).sqrt(),
        'rms': k / (k.norm(dim=-1, keepdim=True) / 8**0.5 + 1e-6),
    }
    assert set(expected) == set(KEY_NORMS)
    for kind, value in expected.items():
        torch.testing.assert_close(KEY_NORMS[kind](k), value)


def test_key_norm_is_not_made_in_half_precision() -> None:
    # The mean of numbers this far from 0 would lose all of their differences.
    k = (torch.randn(1, 4200, 4) + 60).bfloat16()
    exact = instance(k.double())
    actual = instance(k)
    assert actual.dtype == torch.bfloat16
    # One rounding to 8 bits.
    torch.testing.assert_close(actual.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.filterwarnings('ignore:flex_attention called without')
@pytest.mark.parametrize('window', [1, 3, 5])
@pytest.mark.parametrize('hw', [(1, 1), (1, 7), (2, 3), (6, 5), (4, 9)])
def test_neighborhoods_are_exact(
    hw: tuple[int, int], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    # So that even these maps are made in several chunks.
    monkeypatch.setattr(neighborhood, '_GATHERED', 500)
    leaves = [torch.randn(2, hw[0] * hw[1], 2, 4, dtype=torch.float64) for _ in range(3)]
    actual = []
    for function in (neighborhoods, neighborhood_attention):
        inputs = [x.clone().requires_grad_() for x in leaves]
        out = function(*inputs, hw, window)
        out.square().sum().backward()
        actual.append([out, *(x.grad for x in inputs)])
    for a, b in zip(*actual, strict=True):
        torch.testing.assert_close(a, b)
    empty = (x[:0] for x in leaves)
    assert neighborhood_attention(*empty, hw, window).shape == (0, *leaves[0].shape[1:])
    # The mask of the GPU's path, in FlexAttention without a compiler.
    sides = tuple(min(window, side) for side in hw)
    mask = neighborhood._block_mask(hw, sides, 'cpu')
    out = neighborhood._flex(*(x.float() for x in leaves), mask, flex_attention)
    torch.testing.assert_close(out.double(), actual[0][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize('project', [False, True])
def test_linear_attention_by_its_weights(project: bool) -> None:
    torch.manual_seed(0)
    mixer = TTTMixer(8, 2, dict(type='LinearAttention', project=project)).double()
    q, k, v = torch.randn(3, 2, 7, 2, 4, dtype=torch.float64).unbind(0)
    if project:
        nn.init.normal_(mixer.inner.wq)
        nn.init.normal_(mixer.inner.wk)
    left, right = mixer.inner.features(q, k)
    weights = left @ right.mT
    expected = weights / weights.sum(-1, keepdim=True) @ v.transpose(1, 2)
    torch.testing.assert_close(mixer.inner(q, k, v), expected.transpose(1, 2))
    with torch.autocast('cpu', torch.bfloat16):
        assert mixer.float()(torch.randn(1, 6, 8), (2, 3)).dtype == torch.bfloat16


def test_new_parameters_are_named_and_alone_trained() -> None:
    arch = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
    model = T5(arch, img_size=64, cpe=True, only_new=True)
    new = model.new_parameters()
    parts = {'inner.w1', 'inner.w2', 'inner.w3'}
    parts |= {f'{side}_conv.{name}' for side in 'qk' for name in ('weight', 'bias')}
    assert {n.split('.', 3)[3] for n in new if '.mixer.' in n} == parts
    assert {n for n in new if '.mixer.' not in n} == {
        f'blocks.{i}.cpe.{name}' for i in range(2) for name in ('weight', 'bias')
    }
    # Loaded, for another size of images, and copied.
    model.load_state_dict(T5(arch, img_size=64, cpe=True).state_dict(), assign=True)
    model.set_image_size(96)
    model = copy.deepcopy(model)
    assert {n for n, p in model.train().named_parameters() if p.requires_grad} == new
    model(torch.randn(1, 3, 64, 64))[0].square().mean().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == new
    assert T5(arch, mixer=SOFTMAX).new_parameters() == set()
