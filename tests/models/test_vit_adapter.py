"""ViTAdapter: counts, alignment, the definition, gradients, norms, freezing, errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmvttt.models.adapters import ViTAdapter
from mmvttt.models.adapters.deformable_attention import DeformableAttention, SamplingGrid
from mmvttt.models.backbones import ViT3
from ttt_kernels import deform_attn

from .building import shaken

STRIDES = (4, 8, 16, 32)
ARCH = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=48)
OPTIONS = dict(norm_layer=dict(type='GN', num_groups=8), conv_inplane=8)


class Prefixed(nn.Module):
    """The contract of plain backbones and no more, with three tokens in front of the patches."""

    embed_dims, num_layers, patch_size, num_prefix_tokens = 32, 4, 16, 3

    def __init__(self, vit: ViT3) -> None:
        super().__init__()
        self.vit = vit
        self.entered: list[torch.Tensor] = []

    def embed(self, x):
        tokens, hw = self.vit.embed(x)
        prefix = torch.arange(3.0)[:, None].expand(len(x), 3, 32)
        return torch.cat([prefix, tokens], 1), hw

    def run_block(self, index, tokens, hw):
        self.entered.append(tokens[:, :3])
        return torch.cat([tokens[:, :3] + 10, self.vit.run_block(index, tokens[:, 3:], hw)], 1)


def build(num_layers=4, **options):
    torch.manual_seed(0)
    # Untrained, sampling and its weights would not depend on the queries.
    return shaken(ViTAdapter(ViT3(ARCH | dict(num_layers=num_layers)), **OPTIONS | options))


def image(height=64, width=96, batch=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, height, width, generator=generator)


@pytest.mark.parametrize(
    ('arch', 'heads', 'ratio', 'drop_path'),
    [('tiny', 6, 1.0, 0.1), ('small', 6, 1.0, 0.2), ('base', 12, 0.5, 0.3)],
)
def test_defaults_by_width(arch, heads, ratio, drop_path):
    with torch.device('meta'):
        model = ViTAdapter(dict(type='mmvttt.Vittt', arch=arch))
    assert model.interaction_indexes == [(0, 2), (3, 5), (6, 8), (9, 11)]
    extractor = model.interactions[0].extractors[0]
    assert extractor.attention.num_heads == heads
    assert extractor.attention.value_proj.out_features == model.embed_dims * ratio
    assert extractor.drop_path.drop_prob == drop_path
    assert [len(i.extractors) for i in model.interactions] == [1, 1, 1, 3]


@pytest.mark.parametrize('out_indices', [(0,), (3,), (1, 3), (3, 0)])
def test_out_indices(out_indices):
    model = build().eval()
    chosen = build(out_indices=out_indices).eval()
    missing = chosen.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing
    x = image()
    outs = model(x)
    for i, out in zip(out_indices, chosen(x), strict=True):
        # The same operations on the same numbers.
        torch.testing.assert_close(out, outs[i], rtol=0, atol=0)
    sum(out.sin().sum() for out in chosen(x)).backward()
    assert not [n for n, p in chosen.named_parameters() if p.grad is None]


def definition(model, x):
    """ViT-Adapter (Sec. 3.2 to 3.4): its modules joined by hand, with places in pixels."""
    sizes = {s: tuple(math.ceil(side / s) for side in x.shape[2:]) for s in STRIDES}

    def attend(part, query, value, queries, values):
        at = [
            [
                ((column + 0.5) * s / t / sizes[t][1], (row + 0.5) * s / t / sizes[t][0])
                for t in values
            ]
            for s in queries
            for row in range(sizes[s][0])
            for column in range(sizes[s][1])
        ]
        shapes = tuple(sizes[t] for t in values)
        cells = torch.tensor(shapes, dtype=x.dtype).flip(-1)
        grid = SamplingGrid(torch.tensor(at, dtype=x.dtype), cells, shapes)
        return part.attention(part.query_norm(query), part.value_norm(value), grid)

    def as_tokens(c):
        return c.flatten(2).transpose(1, 2)

    pyramid_sizes = [sizes[s] for s in (8, 16, 32)]
    counts = [h * w for h, w in pyramid_sizes]
    tokens, _ = model.backbone.embed(x)
    first, *maps = model.spatial_prior(x)
    pyramid = torch.cat([as_tokens(maps[i]) + model.level_embed[i] for i in range(3)], 1)
    stages = []
    for part, (start, end) in zip(model.interactions, model.interaction_indexes, strict=True):
        actual = attend(part.injector, tokens, pyramid, [16], [8, 16, 32])
        tokens = tokens + part.injector.gamma * actual
        for i in range(start, end + 1):
            tokens = model.backbone.run_block(i, tokens, sizes[16])
        for extractor in part.extractors:
            pyramid = pyramid + attend(extractor, pyramid, tokens, [8, 16, 32], [16])
            hidden = extractor.ffn.fc1(extractor.ffn_norm(pyramid)).split(counts, 1)
            hidden = [
                as_tokens(extractor.ffn.dwconv(h.transpose(1, 2).unflatten(2, size)))
                for h, size in zip(hidden, pyramid_sizes, strict=True)
            ]
            pyramid = pyramid + extractor.ffn.fc2(F.gelu(torch.cat(hidden, 1)))
        stages.append(tokens)
    maps = [
        c.transpose(1, 2).unflatten(2, size)
        for c, size in zip(pyramid.split(counts, 1), pyramid_sizes, strict=True)
    ]
    doubled = F.conv_transpose2d(maps[0], model.up.weight, model.up.bias, stride=2)
    maps.insert(0, first + doubled[..., : sizes[4][0], : sizes[4][1]])
    outs = []
    for i, stride in enumerate(STRIDES):
        added = stages[i if model.task == 'seg' else -1].transpose(1, 2).unflatten(2, sizes[16])
        if stride < 16:
            added = F.interpolate(added, scale_factor=16 / stride, mode='bilinear')
        elif stride > 16:
            # Cells beyond the border do not count.
            added = F.avg_pool2d(added, 2, ceil_mode=True)
        outs.append(model.norms[i](maps[i] + added[..., : sizes[stride][0], : sizes[stride][1]]))
    return outs


@pytest.mark.parametrize('size', [(64, 96), (33, 43)])
@pytest.mark.parametrize('task', ['det', 'seg'])
def test_the_adapter_follows_its_definition(task, size):
    model = build(task=task).double().eval()
    x = image(*size).double()
    for actual, expected in zip(model(x), definition(model, x), strict=True):
        # fp64: roundings of some dozen sums.
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_places_keep_fp32_under_autocast(monkeypatch):
    """In bf16, neighbouring cells of a map 150 wide would fall together."""
    dtypes = []

    def spy(value, spatial_shapes, *points, **options):
        dtypes.extend(x.dtype for x in points)
        return deform_attn(value, spatial_shapes, *points, **options)

    monkeypatch.setattr('mmvttt.models.adapters.deformable_attention.deform_attn', spy)
    with torch.autocast('cpu', torch.bfloat16):
        build()(image())
    assert set(dtypes) == {torch.float32}


def test_tokens_in_front_pass_the_adapter_untouched():
    """The patches get what they get without them, row by row."""
    plain = build().eval()
    model = ViTAdapter(Prefixed(plain.backbone), **OPTIONS).eval()
    vit = {n: w for n, w in plain.state_dict().items() if not n.startswith('backbone.')}
    assert not model.load_state_dict(vit, strict=False).unexpected_keys
    assert model.no_weight_decay() == {'level_embed'}
    x = image()
    for actual, expected in zip(model(x), plain(x), strict=True):
        # The same sums in another layout.
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for block, prefix in enumerate(model.backbone.entered):
        # Ten more after each block, and nothing of the injectors.
        assert torch.equal(prefix[0, :, 0], torch.arange(3.0) + 10 * block)


def test_deformable_attention_starts_as_a_ring():
    attention = DeformableAttention(32, num_heads=4, num_levels=3, num_points=2)
    offsets = attention.sampling_offsets(torch.randn(5, 32)).view(5, 4, 3, 2, 2)
    east, south, west, north = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]
    ring = torch.tensor([east, south, west, north])
    for point in range(2):
        expected = ((point + 1) * ring)[:, None].expand(5, 4, 3, 2)
        torch.testing.assert_close(offsets[..., point, :], expected, rtol=0, atol=1e-6)
    assert not attention.attention_weights(torch.randn(5, 32)).any()


def test_freeze_backbone():
    model = build(freeze_backbone=True).train()
    assert not model.backbone.training
    assert model.spatial_prior.training
    sum(out.sin().sum() for out in model(image())).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) is name.startswith('backbone.'), name


def test_any_depth_and_uneven_groups():
    assert build(num_layers=6).interaction_indexes == [(0, 0), (1, 2), (3, 3), (4, 5)]
    model = build(num_layers=2)
    assert model.interaction_indexes == [(0, 0), (1, 1)]
    assert len(model(image())) == 4


def test_options_without_effect_are_said(caplog) -> None:
    ViTAdapter(dict(type='ViT3', arch=ARCH, out_indices=(0, 3)), norm_layer='BN')
    (record,) = [r for r in caplog.records if r.levelname == 'WARNING']
    assert 'out_indices=(0, 3)' in record.getMessage()


@pytest.mark.parametrize('freeze', [False, True])
def test_the_module_that_it_is_given_stays_as_it_was(freeze: bool) -> None:
    backbone = ViT3(ARCH).eval()
    x = image()
    with torch.no_grad():
        (before,) = backbone(x)
        model = ViTAdapter(backbone, norm_layer='BN', freeze_backbone=freeze).eval()
        model(x)
        assert torch.equal(backbone(x)[0], before)
    assert all(p.requires_grad for p in backbone.parameters())
    inside = model.backbone.state_dict()
    assert all(torch.equal(inside[n], v) for n, v in backbone.state_dict().items() if n in inside)
