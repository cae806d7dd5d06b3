"""Frozen models for inference on a CPU: the same outputs, and no way to change or to train them."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from mmvttt.deploy import cpu
from mmvttt.deploy.cpu import PackedConv1x1, PackedLinear, optimize_for_cpu
from mmvttt.errors import UsageError
from mmvttt.models.backbones import T5, HViT3, ViT3, Vittt

PLAIN = dict(embed_dims=64, num_layers=2, num_heads=2, feedforward_channels=96)
STAGES = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))
BACKBONES = [(Vittt, PLAIN), (ViT3, PLAIN), (T5, PLAIN), (HViT3, STAGES)]
# Relative to the largest output: fp32 sums of some hundred products, in another order.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed products run on every x86 processor, and are fast on some."""
    if not cpu._has_packed_products():
        pytest.skip('this torch has no packed products of oneDNN')
    monkeypatch.setattr(cpu, 'is_worthwhile', lambda: True)


class Small(nn.Module):
    """A pointwise convolution, a norm with running statistics, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 48, 1, bias=False)
        self.norm = nn.BatchNorm2d(48)
        self.hidden = nn.Linear(48, 64)
        self.out = nn.Linear(64, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.out(self.hidden(x).relu())


@pytest.fixture
def source() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 32, 5, 7, generator=torch.Generator().manual_seed(1))


def difference(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(('backbone', 'arch'), BACKBONES)
def test_outputs_agree_and_the_source_stays(backbone: type[nn.Module], arch: dict) -> None:
    torch.manual_seed(0)
    model, x = backbone(arch).train(), torch.randn(2, 3, 96, 128)
    before = copy.deepcopy(model)
    frozen = optimize_for_cpu(model)
    kinds = {type(module) for module in frozen.modules()}
    assert PackedLinear in kinds
    assert PackedConv1x1 in kinds or backbone is not HViT3
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert type(frozen) is backbone
    assert model.training
    assert not any(module.training for module in frozen.modules())
    assert not list(frozen.parameters())
    state = frozen.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(state[name], weight), name
        assert torch.equal(before.state_dict()[name], weight), name
    with torch.inference_mode():
        assert difference(frozen(x), model.eval()(x)) < TOLERANCE


def fused_steps(source: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        source(x).square().mean().backward()
        optimizer.step()


def by_data(source: nn.Module, x: torch.Tensor) -> None:
    for p in source.parameters():
        p.data.mul_(3)


def lora_merge(source: nn.Module, x: torch.Tensor) -> None:
    for layer in (source.hidden, source.out):
        rows, columns = layer.weight.shape
        layer.weight.data += torch.randn(rows, 4) @ torch.randn(4, columns)


def swap(source: nn.Module, x: torch.Tensor) -> None:
    """As mmengine's EMAHook."""
    averaged = copy.deepcopy(source)
    for a, b in zip(averaged.parameters(), source.parameters(), strict=True):
        a.data.mul_(0.5)
        held = a.data.clone()
        a.data.copy_(b.data)
        b.data.copy_(held)


def numpy_views(source: nn.Module, x: torch.Tensor) -> None:
    for tensor in (*source.parameters(), *source.buffers()):
        view = tensor.detach().numpy()
        view += 1


def assignment(source: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        other = {name: torch.ones_like(w) for name, w in source.state_dict().items()}
        source.load_state_dict(other, assign=True)


def training_statistics(source: nn.Module, x: torch.Tensor) -> None:
    source.train()(5 * x + 3)
    source.eval()


def new_part(source: nn.Module, x: torch.Tensor) -> None:
    source.out = nn.Linear(64, 40)
    source.hidden.register_forward_hook(lambda *_: torch.zeros(3, 64))


ATTACKS = (
    fused_steps,
    by_data,
    lora_merge,
    swap,
    numpy_views,
    assignment,
    training_statistics,
    new_part,
)


@pytest.mark.parametrize('attack', ATTACKS)
def test_no_change_of_the_source_reaches_the_frozen_model(
    attack: Callable[[nn.Module, torch.Tensor], None], source: Small, x: torch.Tensor
) -> None:
    frozen = optimize_for_cpu(source)
    expected = source(x).detach()
    with torch.no_grad():
        before = frozen(x)
    torch.testing.assert_close(before, expected, rtol=TOLERANCE, atol=TOLERANCE)
    attack(source, x)
    with torch.no_grad():
        assert torch.equal(frozen(x), before)
        assert not torch.allclose(source(x), expected, atol=1e-3)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda m: m.train(), 'cannot train: do so with the model that it was made from'),
        (lambda m: m.hidden.train(), 'cannot train'),
        (lambda m: m.norm.train(), 'cannot train'),
        (lambda m: nn.Sequential(m).train(), 'cannot train'),
        (lambda m: m.requires_grad_(), 'cannot be trained'),
        (lambda m: m.out.requires_grad_(True), 'cannot be trained'),
        (lambda m: m.load_state_dict(m.state_dict()), 'cannot load weights'),
        (lambda m: m.norm.load_state_dict({}, strict=False), 'cannot load weights'),
        (
            lambda m: nn.Sequential(m).load_state_dict(nn.Sequential(m).state_dict()),
            'cannot load weights',
        ),
        (lambda m: m.half(), r'cannot be moved to torch\.float16'),
        (lambda m: m.to('meta'), "moved to .* on 'meta'"),
        (lambda m: nn.Sequential(m).double(), r'moved to torch\.float64'),
        (lambda m: m(torch.export.export(m, (torch.randn(3, 32, 5, 7),))), 'be traced, compiled'),
    ],
)
def test_what_a_frozen_model_refuses(
    change: Callable[[nn.Module], object], message: str, source: Small, x: torch.Tensor
) -> None:
    frozen = optimize_for_cpu(source)
    with torch.no_grad():
        expected = frozen(x)
        with pytest.raises(UsageError, match=message):
            change(frozen)
        assert torch.equal(frozen(x), expected)
        # A call that changes nothing is allowed.
        frozen.eval().requires_grad_(False).cpu().float()
        assert torch.equal(frozen(x), expected)


def test_gradients_and_tangents_of_the_input(source: Small, x: torch.Tensor) -> None:
    frozen = optimize_for_cpu(source)
    gradients = [
        torch.autograd.grad(m(y := x.clone().requires_grad_()).square().sum(), y)[0]
        for m in (frozen, source)
    ]
    torch.testing.assert_close(*gradients, rtol=TOLERANCE, atol=TOLERANCE)
    assert gradients[0].abs().max() > 0
    tangents = [torch.func.jvp(m, (x,), (torch.ones_like(x),))[1] for m in (frozen, source)]
    torch.testing.assert_close(*tangents, rtol=TOLERANCE, atol=TOLERANCE)
    assert tangents[0].abs().max() > 0
    with torch.no_grad():
        tangents = [torch.func.jvp(m, (x,), (torch.ones_like(x),))[1] for m in (frozen, source)]
    torch.testing.assert_close(*tangents, rtol=TOLERANCE, atol=TOLERANCE)


def test_autocast_reaches_packed_weights(source: Small, x: torch.Tensor) -> None:
    frozen = optimize_for_cpu(source)
    assert isinstance(frozen.hidden, PackedLinear)
    assert isinstance(frozen.conv, PackedConv1x1)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        found = frozen(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, source(x))


@pytest.mark.parametrize(
    'copied', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['copy', 'pickle']
)
def test_copies_are_frozen_too(copied: Callable, source: Small, x: torch.Tensor) -> None:
    frozen = optimize_for_cpu(source)
    twin = copied(frozen)
    with torch.no_grad():
        assert torch.equal(twin(x), frozen(x))
        twin.norm.running_mean += 1
        assert not torch.equal(twin(x), frozen(x))
    with pytest.raises(UsageError, match='cannot train'):
        twin.train()
    # The copy's own.
    assert twin.eval() is twin


def test_free_takes_the_weights(source: Small, x: torch.Tensor) -> None:
    expected, shapes = source(x), {n: p.shape for n, p in source.named_parameters()}
    views = [tensor.detach().numpy() for tensor in (*source.parameters(), *source.buffers())]
    frozen = optimize_for_cpu(source, free=True)
    for view in views:
        view += 1
    torch.testing.assert_close(frozen(x), expected, rtol=TOLERANCE, atol=TOLERANCE)
    for name, parameter in source.named_parameters():
        assert parameter.is_meta, name
        assert parameter.shape == shapes[name], name


def test_weights_of_two_owners_stay_one(x: torch.Tensor) -> None:
    tied = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    tied[1].weight = tied[0].weight
    twice = nn.Linear(40, 40)
    model, y = nn.Sequential(tied, twice, twice), torch.randn(20, 40)
    frozen = optimize_for_cpu(model)
    assert frozen[0][0].weight is frozen[0][1].weight
    assert frozen[1] is frozen[2]
    assert isinstance(frozen[1], PackedLinear)
    with torch.no_grad():
        torch.testing.assert_close(frozen(y), model(y))


def test_only_large_fp32_products_are_packed() -> None:
    class Own(nn.Linear):
        pass

    left = nn.Sequential(
        nn.Linear(8, 8),
        nn.Linear(64, 64).double(),
        Own(64, 64),
        nn.Conv2d(64, 64, 3),
        nn.Conv2d(64, 64, 1, stride=2),
        nn.Conv2d(64, 64, 1, groups=2),
        parametrize.register_parametrization(nn.Linear(64, 64), 'weight', nn.Tanh()),
    )
    kinds = [type(module) for module in optimize_for_cpu(left)]
    assert kinds == [type(module) for module in left]


@pytest.mark.parametrize('shape', [(48,), (1, 48), (0, 48), (2, 3, 48), (2, 5, 96)])
def test_shapes_of_linear(shape: tuple[int, ...]) -> None:
    layer, x = nn.Linear(48, 64), torch.randn(shape)[..., -96 : None : max(1, shape[-1] // 48)]
    with torch.no_grad():
        torch.testing.assert_close(optimize_for_cpu(layer)(x), layer(x))


@pytest.mark.parametrize('shape', [(2, 48, 7, 9), (48, 7, 9), (1, 48, 1, 1), (0, 48, 2, 2)])
@pytest.mark.parametrize('bias', [False, True])
def test_shapes_of_convolutions(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = nn.Conv2d(48, 64, 1, bias=bias), torch.randn(shape)
    packed = optimize_for_cpu(layer)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), layer(x))
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(packed(x), layer(x))


def test_other_processors_freeze_without_packing(
    monkeypatch: pytest.MonkeyPatch, source: Small, x: torch.Tensor
) -> None:
    monkeypatch.setattr(cpu, 'is_worthwhile', lambda: False)
    frozen = optimize_for_cpu(source)
    assert type(frozen.hidden) is nn.Linear
    assert not list(frozen.parameters())
    with torch.no_grad():
        assert torch.equal(frozen(x), source(x))
    with pytest.raises(UsageError, match='cannot train'):
        frozen.train()


def test_what_cannot_be_copied_is_refused(source: Small) -> None:
    source.hidden.to('meta')
    with pytest.raises(UsageError, match=r"hidden\.weight is on 'meta'"):
        optimize_for_cpu(source)
    model = nn.Sequential(nn.Linear(32, 64))
    forward = model[0].forward
    model[0].forward = lambda x: forward(x)
    with pytest.raises(UsageError, match='the forward of 0 was replaced by a function'):
        optimize_for_cpu(model)
