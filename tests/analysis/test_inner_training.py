"""Gradients, losses and states of the inner training against autograd of the definition, fp64."""

import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from mmvttt.analysis.inner_training import inspect_training, largest_tokens
from mmvttt.errors import UsageError
from mmvttt.models.backbones import T5, HViT3, ViT3, Vittt
from mmvttt.models.layers import TTTLinearMixer, TTTMixer, ViT3Mixer
from mmvttt.registry import INNER_LOSSES

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
TOOL = Path(__file__).resolve().parents[2] / 'tools' / 'inspect_training.py'


def random_model(cls: type, arch: dict | None = None, **options) -> nn.Module:
    """In fp64, with parameters of the magnitudes of a trained model."""
    torch.manual_seed(0)
    model = cls(arch or ARCH, **options).double()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1 if 'token_scale' in name else 0.3)
    return model


def inputs_of(model: nn.Module, image: Tensor) -> list[Tensor]:
    """What each token mixer is given."""
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
    """Norms of the gradients and losses of the tokens, and the last (W, c), token by token."""
    _, k, v = (y[0, :, r, head] for y in mixer.project(x))
    eta, tau = mixer.scaled_eta(x)[0, :, r, head], mixer.positional_scale()
    w, c, weight, bias = (y[r, head] for y in mixer.inner_parameters())
    order = range(len(k)) if mixer.directions[r] == 'forward' else range(len(k))[::-1]

    def error(w: Tensor, c: Tensor, t: int) -> Tensor:
        normed = F.layer_norm(k[t] @ w + c, c.shape, weight, bias, mixer.inner_eps)
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
    image = torch.randn(1, 3, 48, 40, dtype=torch.float64)
    layers = inspect_training(model, image)
    assert [layer.name for layer in layers] == ['blocks.0.mixer', 'blocks.1.mixer']
    for layer, x, block in zip(layers, inputs_of(model, image), model.blocks, strict=True):
        mixer, scan = block.mixer, layer.scan
        assert layer.hw == (3, 3)
        for r in range(2):
            for head in range(2):
                norms, losses, w, c = expected_scan(mixer, x, r, head)
                torch.testing.assert_close(scan.magnitude[0, :, r, head], norms)
                torch.testing.assert_close(scan.loss[0, :, r, head], losses)
                torch.testing.assert_close(scan.w[0, r, head], w)
                torch.testing.assert_close(scan.c[0, r, head], c)
                w0 = mixer.w0[r, head]
                torch.testing.assert_close(scan.drift[0, r, head], (w - w0).norm() / w0.norm())
        expected = scan.magnitude.square().sum(-1).sqrt().mean(-1)
        torch.testing.assert_close(layer.magnitude, expected)


def test_it_meets_the_op() -> None:
    """The state ends where the op's does, and the first losses are those of the first state."""
    model = random_model(Vittt, mixer=dict(mini_batch_size=5))
    image = torch.randn(2, 3, 64, 48, dtype=torch.float64)
    layers = inspect_training(model, image)
    for layer, x, block in zip(layers, inputs_of(model, image), model.blocks, strict=True):
        mixer, scan = block.mixer, layer.scan
        q, k, v = mixer.project(x)
        parameters = (mixer.scaled_eta(x), *mixer.inner_parameters(), mixer.positional_scale())
        op = torch.ops.ttt_kernels.ttt_linear
        _, g, states, biases = op(q, k, v, *parameters, 'fb', 5, mixer.inner_eps, 'reference')
        torch.testing.assert_close(scan.w, states[:, :, :, -1])
        torch.testing.assert_close(scan.c, biases[:, :, :, -1])
        magnitude = (k.square().sum(-1) + 1).sqrt() * g.norm(dim=-1)
        torch.testing.assert_close(scan.magnitude, magnitude)
        w0, b0, weight, bias = mixer.inner_parameters()
        k, v = k[:, :5, 0], v[:, :5, 0]
        z = torch.einsum('bthi,hio->btho', k, w0[0]) + b0[0]
        normed = (z - z.mean(-1, keepdim=True)) / (z.var(-1, False, True) + mixer.inner_eps).sqrt()
        first = (weight[0] * normed + bias[0] - (v - k)).norm(dim=-1)
        torch.testing.assert_close(scan.loss[:, :5, 0], first)


@pytest.mark.parametrize('cls_mode', ['middle', 'double'])
def test_class_tokens_are_not_in_the_map(cls_mode: str) -> None:
    model = random_model(Vittt, cls_mode=cls_mode)
    layer = inspect_training(model, torch.randn(1, 3, 32, 48, dtype=torch.float64))[0]
    tokens = layer.scan.magnitude.norm(dim=-1).mean(-1)
    patches = [0, 1, 2, 4, 5, 6] if cls_mode == 'middle' else [1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(layer.magnitude, tokens[:, patches])


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
    found = each(dict(inner.named_parameters()), k, v, masks)
    return sum(g.flatten(2).square().sum((0, 2)) for g in found.values())


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('SwiGLU', {}),
        ('SwiGLU', dict(loss='l2')),
        ('MLP', {}),
        ('MLP', dict(loss='l2', key_norm='instance')),
        ('GatedFC', dict(damping=True)),
        ('DWConv', {}),
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
        expected = expected_share(mixer.inner, mixer.loss, mixer.scale, k, v)
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


def test_what_cannot_be_looked_at_is_refused() -> None:
    image = torch.randn(1, 3, 32, 32)
    with pytest.raises(UsageError, match='Conv2d trains nothing at test time'):
        inspect_training(nn.Conv2d(3, 4, 1), image)
    for mixer in (dict(inner=dict(type='SwiGLU'), loss='l1'), dict(inner=dict(type='FC'))):
        model = T5(ARCH, mixer=mixer)
        with pytest.raises(UsageError, match=r'blocks\.0\.mixer trains by no op'):
            inspect_training(model, image)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(UsageError, match='not told the size'):
        inspect_training(nn.Sequential(TTTLinearMixer(16, 2)), torch.randn(1, 6, 16))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, 'argv', [TOOL.name, *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name='__main__')


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """A config of a small Vittt, and an image."""
    (tmp_path / 'small.py').write_text(
        f"model = dict(type='mmvttt.Vittt', arch={ARCH!r}, img_size=64)\n"
    )
    pixels = np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / 'photo.png'), pixels)
    return tmp_path / 'small.py', tmp_path / 'photo.png'


def test_the_tool_draws_and_writes(
    small: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    shape = ('--shape', 64, 96, '--out', tmp_path / 'out')
    run(monkeypatch, *small, *shape, '--receptive-field')
    said = capsys.readouterr()
    assert 'blocks.1.mixer: loss_first' in said.out
    assert '50% of the receptive field in' in said.out
    # mmengine's list of all parameters.
    assert 'torch.Size' not in said.out + said.err
    lines = (tmp_path / 'out' / 'layers.csv').read_text().splitlines()
    assert lines[0] == 'layer,loss_first,loss_last,drift,variation'
    assert [line.split(',')[0] for line in lines[1:]] == ['blocks.0.mixer', 'blocks.1.mixer']
    assert all(float(value) > 0 for line in lines[1:] for value in line.split(',')[1:])
    lines = (tmp_path / 'out' / 'erf.csv').read_text().splitlines()
    assert [line.split(',')[0] for line in lines] == ['share', '0.2', '0.5', '0.99']
    for name in ('photo', 'loss', 'erf'):
        assert cv2.imread(str(tmp_path / 'out' / f'{name}.png')) is not None


def test_the_tool_on_other_models(
    small: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    config, photo = small
    out = ('--shape', 64, 64, '--out', tmp_path / 'out')
    run(monkeypatch, config, photo, *out, '--cfg-options', 'model.type=mmvttt.ViT3')
    assert 'blocks.1.mixer: variation 0.' in capsys.readouterr().out
    assert ',nan,nan,nan,0.' in (tmp_path / 'out' / 'layers.csv').read_text()
    assert not (tmp_path / 'out' / 'loss.png').exists()
    run(monkeypatch, 'resnet10t', photo, *out, '--receptive-field')
    assert (tmp_path / 'out' / 'erf.png').exists()
    with pytest.raises(SystemExit):
        run(monkeypatch, 'resnet10t', photo, *out)
    assert 'error: ResNet trains nothing at test time' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, config, tmp_path / 'none.png', *out)
    assert 'none.png' in capsys.readouterr().err
