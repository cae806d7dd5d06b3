"""Packed weights for inference on a CPU: same outputs, same training, same state dict."""

import copy
import pickle

import pytest
import torch
from torch import nn

from mmvttt.deploy import cpu as cpu_inference
from mmvttt.deploy.cpu import PackedConv1x1, PackedLinear, optimize_for_cpu

from .building import build

PLAIN = dict(embed_dims=64, num_layers=2, num_heads=2, feedforward_channels=96)
STAGES = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))
BACKBONES = [
    dict(type='mmvttt.Vittt', arch=PLAIN),
    dict(type='mmvttt.ViT3', arch=PLAIN),
    dict(type='mmvttt.T5', arch=PLAIN),
    dict(type='mmvttt.HViT3', arch=STAGES),
]
# Relative to the largest output: fp32 sums of some hundred products, in another order.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed products run on every x86 processor, and are fast on some."""
    if not cpu_inference._has_packed_products():
        pytest.skip('this torch has no packed products of oneDNN')
    monkeypatch.setattr(cpu_inference, 'is_worthwhile', lambda: True)


def backbone(config: dict) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return build(config), torch.randn(2, 3, 96, 128)


def difference(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize('config', BACKBONES, ids=lambda c: c['type'])
def test_outputs_agree_and_training_does_not_change(config: dict) -> None:
    model, x = backbone(config)
    packed = optimize_for_cpu(copy.deepcopy(model))
    kinds = {type(module) for module in packed.modules()}
    assert PackedLinear in kinds
    assert PackedConv1x1 in kinds or config['type'] != 'mmvttt.HViT3'
    assert packed.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert difference(packed.eval()(x), model.eval()(x)) < TOLERANCE
    for network in (model.train(), packed.train()):
        sum(y.mean() for y in network(x)).backward()
    for (name, a), b in zip(packed.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_new_weights_are_packed_anew() -> None:
    plain = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    packed = optimize_for_cpu(copy.deepcopy(plain))
    x = torch.randn(20, 32)
    with torch.no_grad():
        packed(x)
        other = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
        packed.load_state_dict(other.state_dict())
        torch.testing.assert_close(packed(x), other(x))
    step = torch.optim.SGD(packed.parameters(), lr=1.0)
    packed(x).square().mean().backward()
    step.step()
    with torch.no_grad():
        expected = nn.functional.linear(x, packed[0].weight, packed[0].bias)
        torch.testing.assert_close(packed[0](x), expected)


@pytest.mark.parametrize('copied', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_work_on_their_own(copied: object) -> None:
    packed, x = optimize_for_cpu(nn.Linear(32, 64)), torch.randn(20, 32)
    with torch.no_grad():
        before = packed(x)
        twin = copied(packed)
        twin.weight.zero_()
        assert torch.equal(twin(x), twin.bias.expand(20, -1))
        assert torch.equal(packed(x), before)


def test_only_large_fp32_products_are_packed() -> None:
    class Own(nn.Linear):
        pass

    left = [
        nn.Linear(8, 8),
        nn.Linear(64, 64).double(),
        Own(64, 64),
        nn.Conv2d(64, 64, 3),
        nn.Conv2d(64, 64, 1, stride=2),
        nn.Conv2d(64, 64, 1, groups=2),
    ]
    kinds = [type(module) for module in left]
    optimize_for_cpu(nn.Sequential(*left))
    assert [type(module) for module in left] == kinds


def test_convolutions_without_bias_and_autocast() -> None:
    conv = nn.Conv2d(48, 64, 1, bias=False)
    packed, x = optimize_for_cpu(copy.deepcopy(conv)), torch.randn(2, 48, 7, 9)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), conv(x))
        with torch.autocast('cpu', torch.bfloat16):
            assert torch.equal(packed(x), conv(x))


def test_export_sees_ordinary_operators() -> None:
    packed = optimize_for_cpu(nn.Linear(32, 64)).requires_grad_(False)
    x = torch.randn(20, 32)
    program = torch.export.export(packed, (x,))
    assert 'mkldnn' not in str(program.graph)
    torch.testing.assert_close(program.module()(x), packed(x))


def test_other_processors_keep_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_inference, 'is_worthwhile', lambda: False)
    assert type(optimize_for_cpu(nn.Linear(32, 64))) is nn.Linear
