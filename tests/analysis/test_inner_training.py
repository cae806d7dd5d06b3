"""Gradients, losses and states of the inner training against autograd of the definition, fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from mmvttt.analysis.attention import implicit_attention
from mmvttt.analysis.inner_training import (
    effective_rank,
    inspect_training,
    largest_tokens,
    training_of,
)
from mmvttt.analysis.mixers import record_mixers
from mmvttt.errors import UsageError
from mmvttt.models.backbones import T5, HViT3, ViT3, Vittt
from mmvttt.models.layers import TTTLinearMixer, TTTMixer, ViT3Mixer
from mmvttt.openmmlab.registry import INNER_LOSSES
from ttt_kernels import ttt_glu

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)


def random_model(cls: type, arch: dict | None = None, **options) -> nn.Module:
    """In fp64, with parameters of the magnitudes of a trained model."""
    torch.manual_seed(0)
    model = cls(arch or ARCH, **options).double()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1 if 'token_scale' in name else 0.3)
    return model


def inputs_of(model: nn.Module, image: Tensor) -> list[Tensor]:
    """Input of each token mixer."""
    seen = []
    kinds = TTTLinearMixer | TTTMixer | ViT3Mixer
    mixers = [m for m in model.modules() if isinstance(m, kinds)]
    handles = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for m in mixers]
    with torch.no_grad():
        model.eval()(image)
    for handle in handles:
        handle.remove()
    return seen


# -------------------------------------------------------------------------------------------- Vittt


@torch.no_grad()
def expected_scan(mixer: TTTLinearMixer, x: Tensor, r: int, head: int) -> tuple[Tensor, ...]:
    """Norms of the gradients and losses of the tokens, and the last (W, c), of the second image."""
    _, k, v, eta = (y[1, :, r, head] for y in mixer.project(x)[:4])
    tau = mixer.positional_scale()
    w, c, weight, bias = (y[r, head] for y in mixer.inner_parameters())
    order = range(len(k)) if mixer.directions[r] == 'forward' else range(len(k))[::-1]

    def error(w: Tensor, c: Tensor, t: int) -> Tensor:
        normed = F.layer_norm(k[t] @ w + c, c.shape, weight, bias, 1e-6)
        return k[t] + normed - v[t]

    gradient = grad(lambda *args: error(*args).square().sum() / 2, argnums=(0, 1))
    norms, losses = torch.empty_like(k[:, 0]), torch.empty_like(k[:, 0])
    for n, batch in enumerate(torch.tensor(order).split(mixer.mini_batch_size)):
        steps = [gradient(w, c, int(t)) for t in batch]
        for i, (t, (gw, gc)) in enumerate(zip(batch, steps, strict=True)):
            norms[t] = (gw.square().sum() + gc.square().sum()).sqrt()
            losses[n * mixer.mini_batch_size + i] = error(w, c, int(t)).norm()
        last = 1 if tau is None else tau[r, -1]
        w = w - last * sum(eta[t] * gw for t, (gw, _) in zip(batch, steps, strict=True))
        c = c - last * sum(eta[t] * gc for t, (_, gc) in zip(batch, steps, strict=True))
    return norms, losses, w, c


@pytest.mark.parametrize('token_scale', [None, 'learned'])
def test_the_scan_is_its_definition(token_scale: str | None) -> None:
    # 3 × 3 patches: the last mini-batch is not full.
    model = random_model(Vittt, mixer=dict(mini_batch_size=4, token_scale=token_scale))
    image = torch.randn(2, 3, 48, 40, dtype=torch.float64)
    layers = inspect_training(model, image)
    assert [layer.name for layer in layers] == ['blocks.0', 'blocks.1']
    for layer, x, block in zip(layers, inputs_of(model, image), model.blocks, strict=True):
        mixer, scan = block.mixer, layer.scan
        assert layer.hw == (3, 3)
        for r in range(2):
            for head in range(2):
                norms, losses, w, c = expected_scan(mixer, x, r, head)
                torch.testing.assert_close(scan.magnitude[1, :, r, head], norms)
                torch.testing.assert_close(scan.loss[1, :, r, head], losses)
                torch.testing.assert_close(scan.w[1, r, head], w)
                torch.testing.assert_close(scan.c[1, r, head], c)
                w0 = mixer.w0[r, head]
                drift = (w - w0).norm() / w0.norm()
                torch.testing.assert_close(scan.drift[1, -1, r, head], drift)
                assert 1 <= scan.rank[1, r, head] <= 8
                tau = 1 if token_scale is None else mixer.positional_scale()[r, -1]
                rate = mixer.project(x)[3][1, :, r, head] * tau
                torch.testing.assert_close(scan.rate[1, :, r, head], rate)
        # 9 patches: the backward scan has read more before the first four, the forward scan after.
        norms = scan.magnitude.norm(dim=-1)
        torch.testing.assert_close(layer.magnitude[:, :4], norms[:, :4, 1])
        torch.testing.assert_close(layer.magnitude[:, 5:], norms[:, 5:, 0])


@pytest.mark.parametrize('cls_mode', ['middle', 'double'])
def test_class_tokens_are_not_in_the_map(cls_mode: str) -> None:
    model = random_model(Vittt, cls_mode=cls_mode)
    layer = inspect_training(model, torch.randn(1, 3, 32, 48, dtype=torch.float64))[0]
    tokens = layer.scan.magnitude.norm(dim=-1)
    patches = torch.tensor([0, 1, 2, 4, 5, 6] if cls_mode == 'middle' else [1, 2, 3, 4, 5, 6])
    count = tokens.shape[1]
    latest = [int(t < count - 1 - t) for t in patches]
    torch.testing.assert_close(layer.magnitude, tokens[:, patches, latest])


# --------------------------------------------------------------------------------- full-batch steps


def expected_share(inner: nn.Module, loss: str, scale: float, k: Tensor, v: Tensor) -> Tensor:
    """The squared norm of what each of N tokens adds to the gradient, heads first `(H, N, d)`."""
    tokens = k.shape[1]

    def of_token(w: dict, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        predicted = inner.call(w, k, (2, 3)) * mask[:, None]
        # The label of all others fits, so that their loss and its gradient are 0.
        return INNER_LOSSES.get(loss)(predicted, v * mask[:, None], scale)

    masks = torch.eye(tokens, dtype=k.dtype)
    each = vmap(vmap(grad(of_token), in_dims=(None, None, None, 0)), in_dims=(0, 0, 0, None))
    actual = each(dict(inner.named_parameters()), k, v, masks)
    return sum(g.flatten(2).square().sum((0, 2)) for g in actual.values())


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('SwiGLU', {}),
        ('MLP', dict(loss='l2', key_norm='instance')),
        ('GatedFC', dict(damping=True)),
        ('DWConv', {}),
        ('Conv', {}),
        ('FC', dict(loss='l2')),
        ('SiLUFC', dict(loss='smooth_l1')),
    ],
)
def test_shares_of_a_step(kind: str, options: dict) -> None:
    model = random_model(T5, mixer=dict(inner=dict(type=kind), locality='dwc_qk', **options))
    image = torch.randn(1, 3, 32, 48, dtype=torch.float64)
    layers = inspect_training(model, image)
    for layer, x, block in zip(layers, inputs_of(model, image), model.blocks, strict=True):
        mixer = block.mixer
        q, k, v = mixer.qkv(x).chunk(3, dim=-1)
        _, k = mixer.shape_keys(q, k, (2, 3))
        k, v = (y[0].unflatten(-1, mixer.heads).transpose(0, 1) for y in (k, v))
        expected = expected_share(mixer.inner, mixer.options.loss, mixer.scale, k, v)
        torch.testing.assert_close(layer.magnitude[0], expected.sqrt())
        assert layer.scan is None


def test_shares_in_vit3_are_of_both_kinds_of_heads() -> None:
    model = random_model(ViT3)
    image = torch.randn(1, 3, 32, 48, dtype=torch.float64)
    layers = inspect_training(model, image)
    for layer, x, block in zip(layers, inputs_of(model, image), model.blocks, strict=True):
        mixer = block.mixer
        gated, local = mixer.qkv(x)[0].split([48, 24], dim=-1)
        total = 0
        for tokens, heads, kind in ((gated, 2, 'GatedFC'), (local, 1, 'DWConv')):
            k, v = (y.unflatten(-1, (heads, 8)).transpose(0, 1) for y in tokens.chunk(3, -1)[1:])
            inner = TTTMixer(8 * heads, heads, dict(type=kind)).double().inner
            with torch.no_grad():
                inner.w1.copy_(mixer.w1 if heads == 2 else mixer.w3[None])
                if heads == 2:
                    inner.w2.copy_(mixer.w2)
            total = total + expected_share(inner, 'dot', mixer.scale, k, v)
        torch.testing.assert_close(layer.magnitude[0], total.sqrt())


def test_every_stage_has_a_map_of_its_size() -> None:
    arch = dict(embed_dims=(8, 16), depths=(1, 2), num_heads=(1, 2))
    model = HViT3(arch).train()
    layers = inspect_training(model, torch.randn(2, 3, 32, 40))
    assert [layer.hw for layer in layers] == [(8, 10), (4, 5), (4, 5)]
    assert [layer.magnitude.shape for layer in layers] == [(2, 80), (2, 20), (2, 20)]
    assert model.training


def test_bfloat16_is_followed_in_fp32() -> None:
    model = Vittt(ARCH)
    with torch.autocast('cpu', torch.bfloat16):
        layer = inspect_training(model, torch.randn(1, 3, 32, 32))[0]
    assert layer.scan.loss.dtype == layer.scan.w.dtype == layer.magnitude.dtype == torch.float32


# ----------------------------------------------------------------------------------------- the rest


def test_largest_tokens_and_variation_by_hand() -> None:
    magnitude = torch.tensor([[1.0, 5, 2, 4, 3, 0, 0, 0, 0, 0]])
    assert largest_tokens(magnitude).nonzero()[:, 1].tolist() == [1, 3, 4]
    assert largest_tokens(torch.ones(2, 3)).sum(1).tolist() == [1, 1]
    # Ties do not add tokens.
    assert largest_tokens(torch.ones(10)).sum() == 3
    layer = inspect_training(Vittt(ARCH), torch.randn(1, 3, 32, 32))[0]
    map_ = layer.magnitude.numpy()
    assert layer.variation.item() == pytest.approx(map_.std() / map_.mean(), rel=1e-5)


@pytest.mark.parametrize('damping', [False, True])
def test_numbers_of_a_step_by_hand(damping: bool) -> None:
    """FC on the dot loss: Σ g = −s/N·KᵀV, one step of it, less the damping."""
    options = dict(inner=dict(type='FC'), damping=damping)
    model = random_model(T5, dict(ARCH, num_layers=1, num_heads=1), mixer=options)
    image = torch.randn(1, 3, 32, 48, dtype=torch.float64)
    (layer,) = inspect_training(model, image)
    (x,), mixer = inputs_of(model, image), model.blocks[0].mixer
    with torch.no_grad():
        q, k, v = mixer.qkv(x).chunk(3, dim=-1)
        k, v = mixer.shape_keys(q, k, (2, 3))[1][0], v[0]
        each = -mixer.scale / 6 * torch.einsum('ni,no->nio', k, v)
        total, w = each.sum(0), mixer.inner.w1[0]
        move = -total / (total.norm(dim=0) + 1) if damping else -total
        losses = [-mixer.scale / 6 * (k @ u * v).sum() for u in (w, w + move)]
    (step,) = layer.steps
    size = each.flatten(1).norm(dim=-1)
    expected = dict(
        share=size[:, None],
        loss_before=losses[0][None],
        loss_after=losses[1][None],
        drift=(move.norm() / w.norm())[None],
        applied=(move.norm() / total.norm())[None],
        rank=effective_rank(move)[None],
    )
    for name, value in expected.items():
        torch.testing.assert_close(getattr(step, name)[0], value, msg=name)
    assert layer.scalars()['rate'] == pytest.approx(
        1 if not damping else expected['applied'].item()
    )


def test_effective_rank_by_hand() -> None:
    assert effective_rank(torch.diag(torch.tensor([1.0, 1, 0]))).item() == pytest.approx(2)
    assert effective_rank(torch.ones(3, 5)).item() == pytest.approx(1, abs=1e-5)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    actual = effective_rank(torch.stack([torch.diag(torch.tensor([3.0, -1])), torch.zeros(2, 2)]))
    assert actual.tolist() == pytest.approx([math.exp(entropy), 0])


# ------------------------------------------------------------------------- mixers of other packages


class Foreign(nn.Module):
    """A mixer that calls an op of ours, or none."""

    def __init__(self, embed_dims: int, num_heads: int, op: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, num_heads, embed_dims // num_heads, 8) / 3)
        self.op = op

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        tokens = x.unflatten(-1, (-1, 8))
        return ttt_glu(tokens, tokens, tokens, *self.w).flatten(2) if self.op else x


def test_a_mixer_of_ones_own_is_followed_by_its_ops() -> None:
    model = ViT3(ARCH).double()
    for i, block in enumerate(model.blocks):
        block.mixer = Foreign(16, 2, op=i == 0).double()
    mixings = record_mixers(model, torch.randn(1, 3, 32, 48, dtype=torch.float64))
    seen, unseen = map(training_of, mixings)
    assert unseen is None
    assert seen.magnitude.shape == (1, 6)
    assert implicit_attention(mixings[0], [2]).shape == (2, 1, 6)
    assert implicit_attention(mixings[1], [2]) is None
    assert mixings[1].keys is None


def test_a_model_without_a_mixer_is_refused() -> None:
    image = torch.randn(1, 3, 32, 32)
    with pytest.raises(UsageError):
        inspect_training(nn.Conv2d(3, 4, 1), image)
    with pytest.raises(UsageError):
        inspect_training(T5(ARCH, mixer=dict(inner=dict(type='SoftmaxAttention'))), image)
