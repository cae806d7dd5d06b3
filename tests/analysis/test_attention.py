"""Closed forms of implicit attention against autograd; key shift and distance by hand."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from mmvttt.analysis.attention import (
    ImplicitAttention,
    attention_distance,
    attention_rows,
    has_closed_form,
    implicit_attention,
    key_shift,
)
from mmvttt.analysis.mixers import Mixing, record_mixers
from mmvttt.models.backbones import T5, ViT3, Vittt
from mmvttt.models.layers import TTTMixer, neighborhood_attention
from mmvttt.models.layers.neighborhood import neighborhood_weights

HW = (2, 3)
ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)


def mixer(kind: str, inner: dict | None = None, **options) -> TTTMixer:
    torch.manual_seed(0)
    module = TTTMixer(8, 2, dict(type=kind, **(inner or {})), **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module


def jacobians(module: TTTMixer, x: Tensor, hw: tuple[int, int]) -> Tensor:
    """∂o_i/∂v_j by autograd through the mixer, without proj, `(B, H, N, N, d, d)`."""
    q, k, v = module.qkv(x).detach().chunk(3, dim=-1)
    module = copy.deepcopy(module)
    module.proj = torch.nn.Identity()

    def read(v: Tensor) -> Tensor:
        module.qkv.forward = lambda _: torch.cat([q, k, v.flatten(2)], dim=-1)
        return module(x, hw).unflatten(-1, module.heads)

    full = torch.autograd.functional.jacobian(read, v.unflatten(-1, module.heads))
    # (b, i, h, a, b, j, h, c), of which images and heads do not mix.
    return torch.einsum('nihanjhc->nhijac', full)


def mixing_of(module: nn.Module, x: Tensor, hw: tuple[int, int]) -> Mixing:
    """A mixer recorded on its own."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = module

        def forward(self, x: Tensor) -> Tensor:
            return self.mixer(x, hw)

    (found,) = record_mixers(Alone(), x)
    return found


def check_against_autograd(module: TTTMixer, hw: tuple[int, int] = HW) -> None:
    x = torch.randn(2, hw[0] * hw[1], 8, dtype=torch.float64)
    expected = jacobians(module, x, hw)
    mixing = mixing_of(module, x, hw)
    trace = expected.diagonal(dim1=-2, dim2=-1).mean(-1)
    norm = expected.flatten(-2).norm(dim=-1) / 2
    if has_closed_form(mixing):
        found = implicit_attention(mixing)
        torch.testing.assert_close(found.trace, trace)
        torch.testing.assert_close(found.norm, norm)
    queries = [4, 1]
    rows = attention_rows(mixing, queries)
    torch.testing.assert_close(rows.trace, trace[:1, :, queries])
    torch.testing.assert_close(rows.norm, norm[:1, :, queries])


KINDS = ['SwiGLU', 'GatedFC', 'MLP', 'LinearAttention', 'SoftmaxAttention']


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('locality', [None, 'dwc_qk', 'dwc_v'])
def test_closed_forms_are_autograds(kind: str, locality: str | None) -> None:
    check_against_autograd(mixer(kind, key_norm='instance', locality=locality))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('locality', ['dwc_qk', 'dwc_v'])
def test_neighbours_count_too(kind: str, locality: str) -> None:
    check_against_autograd(
        mixer(kind, key_norm='instance', locality=locality, neighborhood=3), (4, 3)
    )


def test_weights_of_neighbours_read_the_values() -> None:
    """At borders too, where the window is shifted."""
    q, k, v = torch.randn(3, 2, 20, 2, 4, dtype=torch.float64)
    weights = neighborhood_weights(q, k, (4, 5), 3)
    assert ((weights > 0).sum(-1) == 9).all()
    read = torch.einsum('bhij,bjhd->bihd', weights, v)
    torch.testing.assert_close(read, neighborhood_attention(q, k, v, (4, 5), 3))


def test_of_softmax_it_is_the_attention_matrix() -> None:
    module = mixer('SoftmaxAttention')
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    found = implicit_attention(mixing_of(module, x, HW))
    torch.testing.assert_close(found.norm.sum(-1), torch.ones(1, 2, 6, dtype=torch.float64))
    v = module.qkv(x)[..., 16:].unflatten(-1, (2, 4)).transpose(1, 2)
    read = module.proj((found.trace @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(read, module(x, HW))


def test_key_shift_by_hand() -> None:
    k = torch.tensor([[1, -1], [0.5, 2], [-1.5, 0], [2, 1]], dtype=torch.float64)
    assert key_shift(k).item() == pytest.approx(0.3921924696, abs=1e-9)
    assert key_shift(k - k.mean(0)).item() == pytest.approx(0, abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    independent = key_shift(torch.randn(64, 196, 64, generator=generator)).mean()
    assert independent.item() == pytest.approx(196**-0.5, rel=0.02)


def test_distance_by_hand() -> None:
    itself, uniform = torch.eye(6), torch.full((6, 6), -1 / 6)
    assert attention_distance(itself, HW).item() == 0
    places = [(r, c) for r in range(2) for c in range(3)]
    apart = [((a - c) ** 2 + (b - d) ** 2) ** 0.5 for a, b in places for c, d in places]
    assert attention_distance(uniform, HW).item() == pytest.approx(sum(apart) / 36)


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('GatedFC', dict(damping=True)),
        ('SwiGLU', dict(loss='l2')),
        ('FC', {}),
        ('DWConv', {}),
        ('SwiGLU', dict(num_batches=2, step='dynamic')),
        ('MLP', dict(depth=3, locality='dwc_v')),
        ('SoftmaxAttention', dict(key_position=HW)),
    ],
)
def test_what_has_no_closed_form_goes_by_autograd(kind: str, options: dict) -> None:
    inner = {'depth': options.pop('depth')} if 'depth' in options else {}
    check_against_autograd(mixer(kind, inner, **options))


def scan_rows(model: Vittt, queries: list[int]) -> ImplicitAttention:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    image = torch.randn(1, 3, 64, 48, dtype=torch.float64)
    return attention_rows(record_mixers(model.double(), image)[1], queries)


def test_a_forward_scan_reads_nothing_behind_the_query() -> None:
    """Heads of the forward scan, then those of the backward scan; inside mini-batches of 4, too."""
    torch.manual_seed(0)
    # A negative learned scale would switch whole tokens off.
    rows = scan_rows(Vittt(ARCH, mixer=dict(mini_batch_size=4, token_scale=None)), [5])
    forward, backward = rows.norm[0, :, 0].split(2)
    assert (forward[:, 6:] == 0).all()
    assert (backward[:, :5] == 0).all()
    assert (forward[:, :6] > 0).all()
    assert (backward[:, 5:] > 0).all()


def test_class_tokens_are_no_patches() -> None:
    torch.manual_seed(0)
    assert scan_rows(Vittt(ARCH, cls_mode='double'), [0, 11]).norm.shape == (1, 4, 2, 12)


def test_vit3_is_read_by_autograd_of_its_ops() -> None:
    """The damped step of both kinds of heads: J·u of the definition for a random direction u."""
    torch.manual_seed(0)
    model = ViT3(ARCH).double()
    mixing = record_mixers(model, torch.randn(1, 3, 32, 48, dtype=torch.float64))[0]
    rows = attention_rows(mixing, [3])
    (_, glu), (_, conv) = mixing.ops
    for args, op, heads in (
        (glu, torch.ops.ttt_kernels.ttt_glu, rows.norm[0, :2, 0]),
        (conv, torch.ops.ttt_kernels.ttt_dwconv, rows.norm[0, 2:, 0]),
    ):
        full = torch.autograd.functional.jacobian(
            lambda v, op=op, args=args: op(*args[:2], v, *args[3:])[0], args[2]
        )
        shape = args[2].shape
        per_head = full.reshape(6, -1, 8, 6, shape[2] if len(shape) == 4 else 1, 8)
        for h, found in enumerate(heads):
            expected = per_head[3, h, :, :, h].pow(2).sum((0, 2)).div(8).sqrt()
            torch.testing.assert_close(found, expected)


def test_attention_of_timm() -> None:
    model = timm.create_model('vit_tiny_patch16_224', depth=2, dynamic_img_size=True)
    mixings = record_mixers(model, torch.randn(1, 3, 48, 64))
    assert [m.label for m in mixings] == ['blocks.0', 'blocks.1']
    for mixing in mixings:
        assert mixing.hw == (3, 4)
        found = implicit_attention(mixing).norm
        # The rest goes to the class token.
        assert (found.sum(-1) < 1).all()
        torch.testing.assert_close(found[:, :, [7, 2]], attention_rows(mixing, [7, 2]).norm)
        attn = mixing.mixer
        attn.fused_attn = False
        seen = []
        attn.attn_drop.register_forward_hook(lambda *args, seen=seen: seen.append(args[1][0]))
        attn(mixing.x)
        torch.testing.assert_close(found, seen[0][:, :, 1:, 1:])


def test_recording_leaves_nothing_behind() -> None:
    model = T5(ARCH, img_size=48).train()
    found = record_mixers(model, torch.randn(2, 3, 48, 33))
    assert [m.name for m in found] == [f'blocks.{i}.mixer' for i in range(2)]
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any('mix' in vars(m) or 'shape_keys' in vars(m) for m in model.modules())
    assert key_shift(found[0].keys).shape == (2,)


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('SwiGLU', dict(loss='l2')),
        ('SwiGLU', dict(step=0.5)),
        ('SoftmaxAttention', dict(key_position=HW)),
    ],
)
def test_what_has_no_closed_form_is_refused(kind: str, options: dict) -> None:
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match='no closed form'):
        implicit_attention(mixing_of(mixer(kind, **options), x, HW))
