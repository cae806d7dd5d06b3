"""A TTT mixer between its projections, with tokens in front of the map."""

import math

import pytest
import torch
from torch import Tensor, nn

from mmvttt.errors import UsageError
from mmvttt.models.layers import InnerTraining, TTTMixer
from mmvttt.models.layers.neighborhood import neighborhood_attention

HW = (5, 7)
PREFIX = 3
TOKENS = PREFIX + HW[0] * HW[1]
SWIGLU = dict(type='SwiGLU')


def random_(module: nn.Module) -> nn.Module:
    """In fp64, with weights large enough for the step to matter."""
    torch.manual_seed(0)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def tokens(count: int = TOKENS) -> tuple[Tensor, ...]:
    """x, q, k, v."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(4, 2, count, 16, generator=generator, dtype=torch.float64))


def by_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 8)).transpose(1, 2)


def convolved(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """The map's tokens plus their convolution, by torch's own, behind the prefix as it is."""
    image = x[:, PREFIX:].transpose(1, 2).unflatten(2, HW)
    local = nn.functional.conv2d(image, conv.weight, conv.bias, padding=1, groups=16)
    return torch.cat([x[:, :PREFIX], x[:, PREFIX:] + local.flatten(2).transpose(1, 2)], 1)


def test_prefix_tokens_train_and_are_read_but_have_no_place_on_the_map() -> None:
    """By hand for x W on the dot loss, W + s/N · KᵀV, with all that surrounds it in T⁵⁺."""
    training = random_(
        InnerTraining(
            16,
            2,
            dict(type='FC'),
            step='dynamic',
            key_norm='instance',
            locality='dwc_qk',
            neighborhood=3,
            key_position=HW,
        )
    )
    x, q, k, v = tokens()
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
    training = random_(InnerTraining(16, 2, SWIGLU, locality='dwc_v'))
    plain = InnerTraining(16, 2, SWIGLU).double()
    plain.load_state_dict(training.state_dict(), strict=False)
    x, q, k, v = tokens()
    added = training.mix(x, q, k, v, HW, PREFIX) - plain.mix(x, q, k, v, HW, PREFIX)
    expected = convolved(v, training.v_conv) - v
    torch.testing.assert_close(added, expected, rtol=1e-10, atol=1e-10)
    assert not added[:, :PREFIX].any()


@pytest.mark.parametrize('kind', ['Conv', 'DWConv'])
def test_an_inner_model_of_the_map_refuses_a_prefix(kind: str) -> None:
    training = InnerTraining(16, 2, dict(type=kind)).double()
    assert training.mix(*tokens(35), HW).shape == (2, 35, 16)
    with pytest.raises(ValueError, match=rf'{kind} .*prefix=3.*SwiGLU'):
        training.mix(*tokens(), HW, prefix=PREFIX)


@pytest.mark.parametrize('options', [dict(num_batches=2), dict(loss='l1', damping=True)])
def test_evaluation_trains_alike_and_keeps_no_graph(options: dict) -> None:
    mixer = random_(TTTMixer(16, 2, dict(type='Conv'), **options))
    x = tokens(35)[0]
    expected = mixer(x, HW)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = mixer(x, HW)
        assert not actual.requires_grad
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=1e-12)
    mixer.requires_grad_(False)
    frozen = mixer(x.clone().requires_grad_(), HW)
    torch.testing.assert_close(frozen, expected, rtol=1e-12, atol=1e-12)


def test_a_training_by_autograd_is_not_exported() -> None:
    mixer = TTTMixer(16, 2, dict(type='FC'))
    with pytest.raises(UsageError, match=r'FC .*SwiGLU'):
        torch.export.export(mixer, (torch.randn(1, 35, 16), HW), strict=False)
    fused = TTTMixer(16, 2, SWIGLU).eval()
    torch.export.export(fused, (torch.randn(1, 35, 16), HW), strict=False)
