"""The contract of every registered backbone: one table, one set of tests."""

import copy
import math

import pytest
import torch
from torch import nn

from .building import MODELS
from .building import build as build_model

PLAIN = dict(embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=96)
STAGES = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))
# Rotary positions, a class token and four registers.
DINO = dict(
    model='vit_small_patch16_dinov3', model_options=dict(embed_dim=64, depth=4, num_heads=2)
)
BN = dict(type='BN')
# A reduced config of each; the strides of its maps.
CASES = {
    'Vittt': (dict(type='mmvttt.Vittt', arch=PLAIN, img_size=64), (16,)),
    'ViT3': (dict(type='mmvttt.ViT3', arch=PLAIN), (16,)),
    'T5': (dict(type='mmvttt.T5', arch=PLAIN, img_size=64), (16,)),
    'TimmViT': (dict(type='mmvttt.TimmViT', linearize=dict(), **DINO), (16,)),
    'HViT3': (dict(type='mmvttt.HViT3', arch=STAGES), (4, 8, 16, 32)),
    'ViTAdapter': (
        dict(
            type='mmvttt.ViTAdapter',
            conv_inplane=16,
            norm_layer=BN,
            # Nothing of the injectors would be seen at γ = 0.
            init_values=0.5,
            backbone=dict(type='mmvttt.Vittt', arch=PLAIN, img_size=64),
        ),
        (4, 8, 16, 32),
    ),
}
every_backbone = pytest.mark.parametrize('name', CASES)


def build(name: str, seed: int = 0, **options) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(copy.deepcopy(CASES[name][0]) | options)


def loss_of(maps: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Not the mean square: after a norm that hardly depends on anything."""
    return sum((m.float() * torch.linspace(-1, 1, m.shape[1])[:, None, None]).mean() for m in maps)


def test_the_table_is_complete() -> None:
    assert set(MODELS) == set(CASES)


@every_backbone
@pytest.mark.parametrize('size', [(64, 64), (31, 31), (225, 333)])
def test_maps_of_any_image(name: str, size: tuple[int, int]) -> None:
    model, strides = build(name).eval(), CASES[name][1]
    with torch.no_grad():
        maps = model(torch.randn(1, 3, *size))
    assert isinstance(maps, tuple)
    grids = [tuple(math.ceil(side / stride) for side in size) for stride in strides]
    assert [tuple(m.shape[2:]) for m in maps] == grids
    assert all(m.isfinite().all() for m in maps)


@every_backbone
def test_a_step_reaches_every_parameter_and_lowers_the_loss(name: str) -> None:
    model = build(name).train()
    x = torch.randn(2, 3, 64, 64)
    loss = loss_of(model(x))
    loss.backward()
    # Not "is not 0": offsets of the deformable attention start from zero weights.
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 / norm * parameter.grad
    assert loss_of(model(x)) < loss


@every_backbone
@pytest.mark.parametrize('head', ['BatchNorm', 'UPerHead', 'FCNHead'])
def test_one_image_has_the_gradients_of_two_copies(name: str, head: str) -> None:
    """Layouts of a batch of 1 are where torch's BatchNorm on the CPU goes wrong (docs/faq.md)."""
    if head != 'BatchNorm':
        pytest.importorskip('mmseg', reason='the heads are of mmsegmentation')
        from mmengine.registry import MODELS as ROOT
    model, strides = build(name).double().train(), CASES[name][1]
    x = torch.randn(1, 3, 96, 80, dtype=torch.float64)
    channels = [m.shape[1] for m in model(x)]
    options = dict(
        channels=8,
        num_classes=3,
        norm_cfg=BN,
        dropout_ratio=0,
        align_corners=False,
        # Whatever default scope an earlier test has left.
        loss_decode=dict(type='mmseg.CrossEntropyLoss'),
    )
    if head == 'BatchNorm':
        top = nn.ModuleList(nn.BatchNorm2d(c) for c in channels)
    elif head == 'UPerHead':
        every = dict(in_channels=channels, in_index=list(range(len(strides))))
        top = ROOT.build(dict(type='mmseg.UPerHead', pool_scales=(2, 3), **every, **options))
    else:
        last = dict(in_channels=channels[-1], in_index=len(strides) - 1)
        top = ROOT.build(dict(type='mmseg.FCNHead', **last, **options))
    top = top.double().train()
    named = [*model.named_parameters(), *top.named_parameters(prefix='head')]
    grads = []
    for copies in (1, 2):
        maps = model(x.expand(copies, -1, -1, -1).clone())
        outs = (
            [m(f) for m, f in zip(top, maps, strict=True)] if head == 'BatchNorm' else [top(maps)]
        )
        # A norm leaves the sum of its output as it was: weigh every cell differently.
        weights = [torch.linspace(-1, 1, o[0].numel()).sin().view_as(o[0]) for o in outs]
        loss = sum((o.tanh() * w).mean() for o, w in zip(outs, weights, strict=True))
        grads.append(torch.autograd.grad(loss, [p for _, p in named], allow_unused=True))
    wrong = [
        key
        for (key, _), one, two in zip(named, *grads, strict=True)
        # fp64: what is left is roundings; an order of magnitude per norm on the way.
        if one is not None and not torch.allclose(one, two, rtol=1e-6, atol=1e-10)
    ]
    assert not wrong, f'{len(wrong)} of {len(named)}: {wrong[:5]}'


@every_backbone
def test_checkpointing_equals_none(name: str) -> None:
    x = torch.randn(2, 3, 64, 64)
    grads = []
    for with_cp in (False, True):
        options = dict(with_cp=with_cp)
        if name == 'ViTAdapter':
            options['backbone'] = CASES[name][0]['backbone'] | options
        model = build(name, **options).train()
        loss_of(model(x)).backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for key, grad in grads[0].items():
        torch.testing.assert_close(grads[1][key], grad, rtol=0, atol=0, msg=key)


@every_backbone
def test_evaluation_is_deterministic_and_changes_nothing(name: str) -> None:
    options = dict(drop_path_rate=0.5)
    if name == 'ViTAdapter':
        options['backbone'] = CASES[name][0]['backbone'] | options
    model = build(name, **options).eval()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        first, second = model(x), model(x)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@every_backbone
def test_state_dict_makes_another_the_same(name: str, tmp_path) -> None:
    model, other = build(name).eval(), build(name, seed=1).eval()
    x = torch.randn(1, 3, 64, 48)
    with torch.no_grad():
        expected = model(x)
        assert not torch.equal(other(x)[-1], expected[-1])
        torch.save(model.state_dict(), tmp_path / 'weights.pth')
        other.load_state_dict(torch.load(tmp_path / 'weights.pth', weights_only=True))
        for a, b in zip(other(x), expected, strict=True):
            assert torch.equal(a, b)
        # The moving average of the weights copies the whole model.
        for a, b in zip(copy.deepcopy(model)(x), expected, strict=True):
            assert torch.equal(a, b)


@every_backbone
def test_layout_of_the_image_does_not_matter(name: str) -> None:
    model = build(name).eval()
    x = torch.randn(2, 3, 64, 80)
    with torch.no_grad():
        usual = model(x)
        channels_last = model(x.to(memory_format=torch.channels_last))
        strided = model(torch.randn(2, 3, 64, 160).copy_(x.repeat_interleave(2, 3))[..., ::2])
    for a, b, c in zip(usual, channels_last, strided, strict=True):
        # fp32; other layouts take other convolutions, whose sums have another order.
        torch.testing.assert_close(b, a, rtol=0, atol=1e-4)
        torch.testing.assert_close(c, a, rtol=0, atol=1e-4)


@every_backbone
def test_autocast_to_bf16_stays_near_fp32(name: str) -> None:
    model = build(name).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        exact = model(x)
        with torch.autocast('cpu', torch.bfloat16):
            rounded = model(x)
    for a, b in zip(rounded, exact, strict=True):
        # bf16 keeps 8 bits, and a few dozen roundings add up; outputs are of size 1 to 4.
        assert (a.float() - b).norm() < 0.05 * b.norm()
    model.train()
    with torch.autocast('cpu', torch.bfloat16):
        loss = loss_of(model(x))
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


@every_backbone
def test_gradients_of_each_image(name: str) -> None:
    """By vmap, as in differentially private training, and one after the other."""
    model = build(name).double().eval()
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def loss(weights: dict, x: torch.Tensor) -> torch.Tensor:
        return sum(y.sin().sum() for y in torch.func.functional_call(model, weights, (x[None],)))

    gradient = torch.func.grad(loss)
    found = torch.func.vmap(gradient, (None, 0))(weights, images)
    for i, image in enumerate(images):
        for n, expected in gradient(weights, image).items():
            # fp64; timm resizes position embeddings in fp32.
            rtol = 1e-5 if n.endswith('pos_embed') else 1e-8
            torch.testing.assert_close(found[n][i], expected, rtol=rtol, atol=rtol, msg=n)


@every_backbone
def test_layers_of_the_learning_rate(name: str) -> None:
    """mmpretrain's protocol: every parameter has a layer, from 0 at the image to the last."""
    model = build(name)
    layers, totals = zip(
        *(model.get_layer_depth(f'backbone.{n}', 'backbone.') for n, _ in model.named_parameters()),
        strict=True,
    )
    (total,) = set(totals)
    assert set(layers) <= set(range(total))
    assert {0, 1, total - 2} <= set(layers)
    assert model.get_layer_depth('head.fc.weight', 'backbone.')[0] == total - 1
    undecayed = getattr(model, 'no_weight_decay', set)()
    assert undecayed <= {n for n, _ in model.named_parameters()}


@every_backbone
def test_a_wrong_image_is_named(name: str) -> None:
    model = build(name).eval()
    with pytest.raises(ValueError, match=r'4, 32, 32') as error:
        model(torch.zeros(1, 4, 32, 32))
    assert 'channels' in str(error.value)
