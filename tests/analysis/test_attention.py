"""Implicit attention against full Jacobians; key shift and distance by hand."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from mmvttt.analysis.attention import (
    attention_distance,
    implicit_attention,
    key_shift,
    softmax_weights,
)
from mmvttt.analysis.mixers import record_mixers
from mmvttt.models.adapters import ViTAdapter
from mmvttt.models.backbones import TimmViT, ViT3, Vittt
from mmvttt.models.layers import TTTMixer

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
    # (b, i, h, a, b, j, h, c), images and heads do not mix.
    return torch.einsum('nihanjhc->nhijac', full)


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        *((kind, dict(key_norm='instance', locality='dwc_qk')) for kind in ('GatedFC', 'MLP')),
        ('SwiGLU', dict(key_norm='instance', locality='dwc_v', neighborhood=3)),
        ('LinearAttention', dict(locality='dwc_v')),
        ('GatedFC', dict(damping=True)),
        ('SwiGLU', dict(loss='l2')),
        ('FC', {}),
        ('DWConv', {}),
        ('SwiGLU', dict(num_batches=2, step='dynamic')),
        ('MLP', dict(inner=dict(depth=3), locality='dwc_v')),
        ('SoftmaxAttention', dict(key_position=HW)),
    ],
)
def test_it_is_the_norm_of_the_jacobian(kind: str, options: dict) -> None:
    module = mixer(kind, **options)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    norm = jacobians(module, x, HW).flatten(-2).norm(dim=-1) / 2
    alone = nn.Module()
    alone.mixer, alone.forward = module, lambda x: module(x, HW)
    actual = implicit_attention(*record_mixers(alone, x), [4, 1])
    torch.testing.assert_close(actual, norm[0, :, [4, 1]])


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


def scan_rows(model: Vittt, queries: list[int]) -> Tensor:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    image = torch.randn(1, 3, 64, 48, dtype=torch.float64)
    return implicit_attention(record_mixers(model.double(), image)[1], queries)


def test_a_forward_scan_reads_nothing_behind_the_query() -> None:
    """Heads of the forward scan, then of the backward scan; inside mini-batches of 4, too."""
    torch.manual_seed(0)
    # A negative learned scale would switch whole tokens off.
    rows = scan_rows(Vittt(ARCH, mixer=dict(mini_batch_size=4, token_scale=None)), [5])
    forward, backward = rows[:, 0].split(2)
    assert (forward[:, 6:] == 0).all()
    assert (backward[:, :5] == 0).all()
    assert (forward[:, :6] > 0).all()
    assert (backward[:, 5:] > 0).all()


def test_class_tokens_are_no_patches() -> None:
    torch.manual_seed(0)
    assert scan_rows(Vittt(ARCH, cls_mode='double'), [0, 11]).shape == (4, 2, 12)


def test_vit3_is_read_by_autograd_of_its_ops() -> None:
    """The damped step of both kinds of heads: J·u of the definition for a random direction u."""
    torch.manual_seed(0)
    model = ViT3(ARCH).double()
    mixing = record_mixers(model, torch.randn(1, 3, 32, 48, dtype=torch.float64))[0]
    rows = implicit_attention(mixing, [3])
    (_, glu, backend), (_, conv, _) = mixing.ops
    for args, op, heads in (
        (glu, torch.ops.ttt_kernels.ttt_glu, rows[:2, 0]),
        (conv, torch.ops.ttt_kernels.ttt_dwconv, rows[2:, 0]),
    ):
        full = torch.autograd.functional.jacobian(
            lambda v, op=op, args=args: op(*args._replace(v=v), backend)[0], args.v
        )
        shape = args.v.shape
        per_head = full.reshape(6, -1, 8, 6, shape[2] if len(shape) == 4 else 1, 8)
        for h, actual in enumerate(heads):
            expected = per_head[3, h, :, :, h].pow(2).sum((0, 2)).div(8).sqrt()
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize('kind', ['timm', 'TimmViT', 'ViTAdapter'])
# The second has rotary positions and registers.
@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'vit_small_patch16_dinov3'])
def test_softmax_of_timm(name: str, kind: str) -> None:
    """The weights that its unfused attention forms, of timm's model, a backbone, in an adapter."""
    options = dict(embed_dim=64, depth=4, num_heads=2)
    vit: nn.Module = TimmViT(name, model_options=options)
    if kind == 'timm':
        vit = timm.create_model(name, **options, dynamic_img_size=True, dynamic_img_pad=True)
    model = ViTAdapter(vit, norm_layer='BN') if kind == 'ViTAdapter' else vit
    image = torch.randn(1, 3, 48, 60)
    mixings = record_mixers(model, image)
    assert [m.label for m in mixings] == [f'blocks.{i}' for i in range(4)]
    weights = []
    for mixing in mixings:
        assert mixing.mixer.fused_attn
        mixing.mixer.fused_attn = False
        mixing.mixer.attn_drop.register_forward_hook(lambda *args: weights.append(args[2]))
    with torch.no_grad():
        model.eval()(image)
    for mixing, expected in zip(mixings, weights, strict=True):
        assert mixing.hw == (3, 4)
        torch.testing.assert_close(softmax_weights(mixing), expected)
        patches = expected[0, :, -12:, -12:]
        torch.testing.assert_close(implicit_attention(mixing, [7, 2]), patches[:, [7, 2]])
