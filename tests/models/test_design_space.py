"""ViT³'s design space: counts, losses, fused points, and tokens in front of the map."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jacrev

from mmvttt.errors import OptionError, UsageError
from mmvttt.models.layers import InnerTraining, TTTMixer
from mmvttt.models.layers.inner_losses import INNER_LOSSES
from mmvttt.models.layers.neighborhood import neighborhood_attention

HW = (5, 7)
PREFIX = 3
TOKENS = PREFIX + HW[0] * HW[1]
SWIGLU = dict(type='SwiGLU')


def mixer(inner: str | dict, kind: type = TTTMixer, **kwargs) -> InnerTraining:
    """In fp64, with weights large enough for the step to matter."""
    torch.manual_seed(0)
    module = kind(16, 2, inner, **kwargs).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def views(count: int = TOKENS) -> tuple[Tensor, ...]:
    """x, q, k, v."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(4, 2, count, 16, generator=generator, dtype=torch.float64))


def tokens() -> Tensor:
    return views(35)[0]


FUSED = [
    *((kind, dict(damping=value)) for kind in ('GatedFC', 'DWConv') for value in (False, True)),
    *((kind, dict(loss=loss)) for kind in ('MLP', 'SwiGLU') for loss in ('dot', 'l2')),
]
OTHERS = [
    ('FC', {}),
    ('GatedFC', dict(loss='l2')),
    ('MLP', dict(damping=True)),
    *((dict(type='MLP', **o), {}) for o in (dict(depth=3), dict(ratio=2), dict(residual='input'))),
    ('SwiGLU', dict(loss='l1')),
    *(('GatedFC', o) for o in (dict(num_batches=2), dict(step='dynamic'))),
    *(('DWConv', o) for o in (dict(epochs=2), dict(step=0.5))),
]


@pytest.mark.parametrize(('inner', 'options'), FUSED)
def test_the_fused_points_equal_the_definition(inner: str, options: dict) -> None:
    results = []
    for fused in (True, False):
        module = mixer(inner, scale=1 / 3, **options)
        assert module.fused
        module.fused = fused
        x = tokens().requires_grad_()
        out = module(x, HW)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in module.parameters())])
    for one, other in zip(*results, strict=True):
        # fp64: what is left is rounding.
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_other_points_are_not_fused() -> None:
    assert not [(inner, options) for inner, options in OTHERS if mixer(inner, **options).fused]


def test_mini_batches_and_epochs_are_steps_in_order() -> None:
    """Tab. 2: B = N/3 takes three steps, each at the weights that the last one left."""
    module = mixer(dict(type='FC'), loss='l2', num_batches=3, epochs=2, step=0.7)
    k, v = torch.randn(2, 35, 8, dtype=torch.float64)
    w = module.inner.w1[0].detach()
    trained = module.train_inner({'w1': w}, k, v, torch.ones(35, dtype=torch.float64), HW)['w1']
    for batch in [slice(0, 12), slice(12, 24), slice(24, 35)] * 2:
        kb, vb = k[batch], v[batch]
        # Eq. 7, with the mean over tokens and 1/√d of Eq. 10.
        w = w - 0.7 * kb.mT @ (kb @ w - vb) / (len(kb) * math.sqrt(8))
    torch.testing.assert_close(trained, w)


def test_convolutions_are_torchs() -> None:
    x = torch.randn(35, 8, dtype=torch.float64)
    image = x.T.reshape(1, 8, *HW)
    for kind in ('Conv', 'DWConv'):
        inner = mixer(dict(type=kind)).inner
        weight = inner.w1[0]
        full = weight if kind == 'Conv' else weight[:, None]
        groups = 1 if kind == 'Conv' else 8
        expected = F.conv2d(image, full, padding=1, groups=groups)[0].flatten(1).T
        torch.testing.assert_close(inner.call({'w1': weight}, x, HW), expected)


def test_identity_initialisation_of_tab_6() -> None:
    inner = TTTMixer(16, 2, dict(type='MLP', identity_init=True)).inner
    torch.testing.assert_close(inner.w2[1], torch.eye(8))
    assert inner.w1.std().item() == pytest.approx(0.02, rel=0.3)


def test_damping_is_per_output_channel() -> None:
    def damped(inner: str, gradient: Tensor) -> Tensor:
        return mixer(dict(type=inner), damping=True)._damped('w1', gradient)

    matrix = torch.tensor([[3.0, 0.0], [4.0, 1.0]])
    expected = torch.tensor([[0.5, 0.0], [4 / 6, 0.5]])
    torch.testing.assert_close(damped('GatedFC', matrix), expected)
    kernels = torch.stack([torch.ones(3, 3), torch.zeros(3, 3)])
    torch.testing.assert_close(damped('DWConv', kernels), kernels / 4)
    full = torch.ones(2, 1, 3, 3)
    torch.testing.assert_close(damped('Conv', full), full / 4)


@pytest.mark.parametrize(
    ('loss', 'expected'),
    [
        # Eq. 8 to 16, with s = 1/√d and the mean over tokens.
        ('dot', lambda p, v, c: -c * (p * v).sum()),
        ('l2', lambda p, v, c: c / 2 * F.mse_loss(p, v, reduction='sum')),
        ('rmse', lambda p, v, c: (c * F.mse_loss(p, v, reduction='sum')).sqrt()),
        ('l1', lambda p, v, c: c * F.l1_loss(p, v, reduction='sum')),
        ('smooth_l1', lambda p, v, c: c * F.huber_loss(p, v, reduction='sum')),
    ],
)
def test_each_loss(loss: str, expected: Callable) -> None:
    torch.manual_seed(0)
    p, v = 2 * torch.randn(2, 6, 8, dtype=torch.float64)
    s = 8**-0.5

    def derivatives(f: Callable) -> tuple[Tensor, ...]:
        """Also ∂²L/∂V̂∂V, by which the values learn."""
        return f(p, v), grad(f)(p, v), jacrev(grad(f), argnums=1)(p, v)

    actual = derivatives(lambda p, v: INNER_LOSSES[loss](p, v, s))
    torch.testing.assert_close(actual, derivatives(lambda p, v: expected(p, v, s / len(p))))


def test_rmse_of_a_perfect_prediction_has_no_gradient() -> None:
    p = torch.randn(3, 4)
    assert not grad(INNER_LOSSES['rmse'])(p, p.clone(), 0.5).any()


def test_weights_that_are_no_parameters_for_a_while() -> None:
    """FSDP puts plain tensors in their places while a block is computed again."""
    module, x = mixer(dict(type='MLP'), loss='l2'), tokens()
    expected = module(x, HW)
    for name, weight in list(module.inner.named_parameters()):
        delattr(module.inner, name)
        setattr(module.inner, name, weight.detach().clone())
    assert not list(module.inner.parameters())
    assert torch.equal(module(x, HW), expected)


def by_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 8)).transpose(1, 2)


def convolved(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """The map's tokens plus their convolution, by torch's own, behind the prefix as it is."""
    image = x[:, PREFIX:].transpose(1, 2).unflatten(2, HW)
    local = F.conv2d(image, conv.weight, conv.bias, padding=1, groups=16)
    return torch.cat([x[:, :PREFIX], x[:, PREFIX:] + local.flatten(2).transpose(1, 2)], 1)


def test_prefix_tokens_train_and_are_read_but_have_no_place_on_the_map() -> None:
    """By hand for x W on the dot loss, W + s/N · KᵀV, with all that surrounds it in T⁵⁺."""
    around = dict(key_norm='instance', locality='dwc_qk', neighborhood=3, key_position=HW)
    training = mixer(dict(type='FC'), InnerTraining, step='dynamic', **around)
    x, q, k, v = views()
    out = training.mix(x, q, k, v, HW, prefix=PREFIX)

    position = torch.cat([torch.zeros_like(training.key_pos[:, :PREFIX]), training.key_pos], 1)
    shifted = (k + position) * training.key_gain
    near = neighborhood_attention(
        *(y[:, PREFIX:].unflatten(-1, (2, 8)) for y in (q, shifted, v)), HW, 3
    ).flatten(2)
    normed = (shifted - shifted.mean(1, keepdim=True)) / (
        shifted.var(1, correction=0, keepdim=True) + 1
    ).sqrt()
    k, q = convolved(normed, training.k_conv), convolved(q, training.q_conv)
    eta = training.eta(x).sigmoid().transpose(1, 2).unsqueeze(-1)
    step = by_heads(k).mT @ (eta * by_heads(v)) / (TOKENS * math.sqrt(8))
    expected = (by_heads(q) @ (training.inner.w1 + step)).transpose(1, 2).flatten(2)
    expected[:, PREFIX:] = (expected[:, PREFIX:] + near) / 2
    # fp64: what is left is the order of sums.
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_the_convolved_values_are_those_of_the_map() -> None:
    training = mixer(SWIGLU, InnerTraining, locality='dwc_v')
    plain = InnerTraining(16, 2, SWIGLU).double()
    plain.load_state_dict(training.state_dict(), strict=False)
    x, q, k, v = views()
    added = training.mix(x, q, k, v, HW, PREFIX) - plain.mix(x, q, k, v, HW, PREFIX)
    expected = convolved(v, training.v_conv) - v
    torch.testing.assert_close(added, expected, rtol=1e-10, atol=1e-10)
    assert not added[:, :PREFIX].any()


@pytest.mark.parametrize('kind', ['Conv', 'DWConv'])
def test_an_inner_model_of_the_map_refuses_a_prefix(kind: str) -> None:
    training = InnerTraining(16, 2, dict(type=kind)).double()
    assert training.mix(*views(35), HW).shape == (2, 35, 16)
    with pytest.raises(OptionError):
        training.mix(*views(), HW, prefix=PREFIX)


@pytest.mark.parametrize('options', [dict(num_batches=2), dict(loss='l1', damping=True)])
def test_evaluation_trains_alike_and_keeps_no_graph(options: dict) -> None:
    module = mixer(dict(type='Conv'), **options)
    x = tokens()
    expected = module(x, HW)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = module(x, HW)
        assert not actual.requires_grad
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=1e-12)
    module.requires_grad_(False)
    frozen = module(x.clone().requires_grad_(), HW)
    torch.testing.assert_close(frozen, expected, rtol=1e-12, atol=1e-12)


def test_a_training_by_autograd_is_not_exported() -> None:
    mixer = TTTMixer(16, 2, dict(type='FC'))
    with pytest.raises(UsageError):
        torch.export.export(mixer, (torch.randn(1, 35, 16), HW), strict=False)
    fused = TTTMixer(16, 2, SWIGLU).eval()
    torch.export.export(fused, (torch.randn(1, 35, 16), HW), strict=False)
