"""TTT in timm's transformers: with softmax put back it is the source, and the traps on the way."""

import copy
import json
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention, resample_patch_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import mmvttt.models.timm  # noqa: F401 - registers linear_vit
from mmvttt.errors import OptionError, UsageError
from mmvttt.models.layers.inner_models import INNER_MODELS
from mmvttt.models.linearize import MapSize, linearize
from mmvttt.models.linearize.folder import save_pretrained

from .building import SOFTMAX, shaken

VIT, ROTARY = 'vit_tiny_patch16_224', 'vit_small_patch16_dinov3'
BEIT = 'beit_base_patch16_224'
# Models that take images of one size.
FIXED: dict = dict(dynamic_img_size=None, img_size=(48, 80))
# One of each kind, in a reduced size: name in timm → options.
MODELS: dict[str, dict] = {
    VIT: {},
    'deit_tiny_distilled_patch16_224': {},
    'deit3_small_patch16_224': {},
    'vit_base_patch16_siglip_224': {},
    'vit_small_patch14_reg4_dinov2': {},
    ROTARY: {},
    'vit_small_patch16_dinov3_qkvb': {},
    'q and k norms, rotary positions': dict(qk_norm=True),
    'gate': dict(attn_type='rope', gated=True),
    'eva02_tiny_patch14_224': {},
    'vit_small_patch16_rope_224': {},
    'vit_small_patch16_rope_mixed_224': {},
    'beit3_base_patch16_224': {},
    'vit_small_patch16_18x2_224': {},
    'vit_huge_patch16_sapiens2': dict(num_heads=4, num_kv_heads=2),
    BEIT: FIXED,
    'shared biases': dict(FIXED, use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
    'beitv2_base_patch16_224': FIXED,
    'vit_relpos_small_patch16_224': FIXED,
    'vit_relpos_small_patch16_rpn_224': FIXED,
    'vit_srelpos_small_patch16_224': FIXED,
}
# Where timm has no name for a kind.
NAMES = {
    **dict.fromkeys(('q and k norms, rotary positions', 'gate'), ROTARY),
    'shared biases': BEIT,
}
SMALL = dict(depth=2, embed_dim=32, num_heads=2, num_classes=3, dynamic_img_size=True)


def build(name: str, **options) -> nn.Module:
    options = {**SMALL, **MODELS.get(name, {}), **options}
    if options['dynamic_img_size'] is None:
        del options['dynamic_img_size']
    gated = options.pop('gated', False)
    model = timm.create_model(NAMES.get(name, name), **options)
    if gated:
        for block in model.blocks:
            block.attn.gate = nn.Linear(32, 32)
    return shaken(model.double())


def noise(h: int, w: int, number: int = 1, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(batch, 3, h, w, generator=generator, dtype=torch.float64)


def images(model: nn.Module, h: int = 3, w: int = 5) -> Tensor:
    """Images of h×w patches, not square."""
    p = model.patch_embed.patch_size[0]
    return noise(h * p, w * p)


class Source(NamedTuple):
    """A kind of transformer.

    Attributes:
        build: A small one, in fp64.
        inputs: Arguments of a call, from the model and a number. An odd number turns the map where
            the model takes more than one size.
        attentions: Number of its self-attentions.
        loses: Whether it has biases of pairs of positions.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, int], dict[str, Any]]
    attentions: int = 2
    loses: bool = False


def _patches(model: nn.Module, number: int) -> dict[str, Any]:
    p = model.patch_embed.patch_size[0]
    h, w = (5, 3) if number % 2 else (3, 5)
    return dict(x=noise(h * p, w * p, number))


SOURCES = {
    **{
        name: Source(
            partial(build, name),
            (lambda model, number: dict(x=noise(48, 80, number)))
            if 'img_size' in options
            else _patches,
            4 if '18x2' in name else 2,
            'img_size' in options,
        )
        for name, options in MODELS.items()
    },
}
if find_spec('diffusers'):
    from . import test_linearize_diffusion as diffusers

    SOURCES |= {
        name: Source(partial(diffusers.build, name), partial(diffusers.numbered, name), count)
        for name, count in (('DiT', 3), ('SD3', 6), ('PixArt', 2), ('Flux', 4))
    }
each = pytest.mark.parametrize('name', SOURCES)


def outputs(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """With all tokens: a class token does not read the last block's patches."""
    out = model(**inputs)
    return [out, model.forward_features(**inputs)] if isinstance(out, Tensor) else [out.sample]


@each
def test_with_softmax_put_back_it_is_the_source(name: str) -> None:
    source = SOURCES[name].build()
    if name == 'PixArt':
        source.transformer_blocks[0].attn1.rescale_output_factor = 2.0
    model, partly = copy.deepcopy(source), copy.deepcopy(source)
    record = linearize(model, **SOFTMAX)
    assert not record.new
    assert len(record.replaced) == SOURCES[name].attentions
    assert bool(record.gone) is SOURCES[name].loses
    models = [model]
    if name not in ('vit_srelpos_small_patch16_224', 'shared biases'):
        # Their blocks share their biases.
        last = record.replaced[-1]
        assert linearize(partly, last, **SOFTMAX).left.keys() >= {*record.replaced} - {last}
        models.append(partly)
    assert not any('relative_position_index' in n for n, _ in model.named_buffers())
    weights = {n: w for n, w in source.state_dict().items() if n not in record.gone}
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(w, weights[n]) for n, w in model.state_dict().items())
    for changed in (source, partly):
        for gone in {*record.gone} & {n for n, _ in changed.named_parameters()}:
            # The source without its biases of pairs of positions.
            nn.init.zeros_(changed.get_parameter(gone))
    # Both call the same softmax on the same numbers; with biases of 0, torch's other one, in joint
    # attention the text lies in front of the image here, behind it there, and biases of queries
    # and values are added behind their product here, in it there: fp64.
    other = name in ('SD3', 'Flux') or any(n.endswith('.q_bias') for n in weights)
    atol = 1e-12 if record.gone or other else 0
    for number in range(2):
        inputs = SOURCES[name].inputs(source, number)
        expected = outputs(source, inputs)
        for changed in models:
            for pair in zip(outputs(changed, inputs), expected, strict=True):
                torch.testing.assert_close(*pair, rtol=0, atol=atol)


@each
def test_every_gradient_arrives(name: str) -> None:
    source = SOURCES[name].build()
    model = copy.deepcopy(source).train()
    record = linearize(model)
    before, after = (dict(m.named_parameters()) for m in (source, model))
    assert record.kept == sum(p.numel() for n, p in before.items() if n not in record.gone)
    assert set(record.new) == after.keys() - before.keys()
    assert record.added == sum(after[n].numel() for n in record.new)
    out = outputs(model, SOURCES[name].inputs(source, 0))[-1]
    weights = torch.linspace(-1, 1, out[0].numel(), dtype=torch.float64).sin()
    (out * weights.view_as(out[0])).sum().backward()
    head = ('head', 'aux_head', 'fc_norm', 'attn_pool')
    with_grad = {n for n, p in after.items() if p.grad is not None and p.grad.isfinite().all()}
    assert not [n for n in after.keys() - with_grad if not n.startswith(head)]
    assert not [n for n in record.new if not after[n].grad.any()]


@pytest.mark.parametrize('name', ['vit_small_patch14_reg4_dinov2', ROTARY])
def test_images_of_other_sizes(name: str) -> None:
    source = build(name, dynamic_img_pad=True)
    model = copy.deepcopy(source)
    linearize(model, **SOFTMAX)
    for h, w in ((1, 1), (1, 4), (7, 2)):
        x = images(source, h, w)
        for image in (x, x[..., 3:, 5:]):
            assert torch.equal(model(image), source(image))


@pytest.mark.parametrize('name', [ROTARY, *({'SD3'} & SOURCES.keys())])
def test_compiled_exported_and_in_half_precision(name: str) -> None:
    source = SOURCES[name].build()
    calls = [SOURCES[name].inputs(source, number) for number in range(2)]
    calls = [{n: x.float() if x.is_floating_point() else x for n, x in c.items()} for c in calls]
    model = source.float()
    linearize(model)
    with torch.no_grad():
        expected = [outputs(model, call)[0] for call in calls]
        # The hooks of diffusers' models break the graph.
        compiled = torch.compile(model, backend='eager', fullgraph=name == ROTARY)
        for call, out in zip(calls, expected, strict=True):
            # The same operations.
            actual = compiled(**call)
            assert torch.equal(actual if name == ROTARY else actual.sample, out)
        if name == ROTARY:
            program = torch.export.export(model, (), calls[0]).module()
            assert torch.equal(program(**calls[0]), expected[0])
        with torch.autocast('cpu', torch.bfloat16):
            half = outputs(model, calls[0])[0]
    # bf16 keeps 8 bits, and a few dozen roundings add up.
    assert (half.float() - expected[0]).norm() < 0.05 * expected[0].norm()


def test_what_must_not_decay() -> None:
    model = build(VIT)
    before = model.no_weight_decay()
    linearize(model, qk_affine=True, key_position=(2, 2))
    own = ('key_pos', 'qk_scale', 'qk_offset')
    names = {n for n, _ in model.named_parameters() if n.rpartition('.')[2] in own}
    assert len(names) >= 6
    assert model.no_weight_decay() == before | names
    assert copy.deepcopy(model).no_weight_decay() == before | names


def test_where() -> None:
    names = [f'blocks.{i}.attn' for i in range(4)]
    for where, chosen in (
        ('all', names),
        ('t5', names),
        ([1, 3], [names[1], names[3]]),
        (2, [names[2]]),
        (['blocks.0.attn', 3], [names[0], names[3]]),
        ('blocks.1.attn', [names[1]]),
    ):
        model = build('vit_tiny_patch16_224', depth=4)
        record = linearize(model, where)
        assert record.replaced == chosen
        assert record.left == {n: 'not chosen' for n in names if n not in chosen}
    text = str(record)
    for row in ('blocks.*.attn', 'not chosen', 'inner.w3', 'initialised randomly', '0.00M new'):
        assert row in text


@pytest.mark.parametrize('name', ['vit_small_r26_s32_224', 'vitamin_small_224'])
def test_behind_convolutions(name: str) -> None:
    with torch.device('meta'):
        model = timm.create_model(name, dynamic_img_size='vitamin' not in name)
        linearize(model)
        size = (224, 224) if 'vitamin' in name else (160, 288)
        assert model(torch.empty(1, 3, *size)).dim() == 2


@pytest.mark.stress
def test_the_whole_registry() -> None:
    refused = {}
    warnings.simplefilter('ignore')
    for name in timm.list_models(exclude_filters='linear_vit'):
        with torch.device('meta'):
            model = timm.create_model(name)
        try:
            linearize(model)
        except ValueError as error:
            refused[name] = str(error)
    # timm 1.0.31 has 285: 156, 65, 16, 14, 13, 7, 14, by module.
    assert len(timm.list_models(exclude_filters='linear_vit')) - len(refused) >= 285


def changed(change: Callable[[nn.Module], object], name: str = VIT) -> nn.Module:
    model = build(name)
    change(model)
    return model


def without_sizes(model: nn.Module) -> None:
    """A block that takes tokens only."""
    model.blocks[1] = nn.Identity()


def meta(name: str) -> nn.Module:
    with torch.device('meta'):
        return timm.create_model(name)


vit = partial(build, VIT)
method = partial(VisionTransformer.forward_features, None)
BAD: list[tuple[Callable[[], Any], dict]] = [
    *((vit, dict(where=where)) for where in (5, 't6', [], 'sd3.5-t5')),
    (vit, dict(iner='MLP')),
    (partial(vit, attn_drop_rate=0.1), {}),
    (lambda: torch.compile(vit()), {}),
    (lambda: VIT, {}),
    (partial(build, 'vit_srelpos_small_patch16_224'), dict(where=[0])),
    (lambda: changed(lambda m: setattr(m, 'forward_features', method)), {}),
    (lambda: changed(lambda m: setattr(m.blocks[1].attn, 'head_dim', 15)), {}),
    (lambda: changed(without_sizes), {}),
    (lambda: changed(without_sizes, BEIT), {}),
    # Of an unknown class, of unknown attentions in its blocks.
    (partial(meta, 'samvit_base_patch16'), {}),
    (partial(meta, 'vit_dlittle_patch16_reg1_gap_256'), {}),
    (partial(meta, 'vit_base_patch16_xp_224'), {}),
]


@pytest.mark.parametrize(('make', 'options'), BAD)
def test_bad_input_leaves_the_model_as_it_was(make: Callable, options: dict) -> None:
    model = make()
    before = [(n, type(m)) for n, m in getattr(model, 'named_modules', list)()]
    with pytest.raises(OptionError):
        linearize(model, **options)
    modules = dict(getattr(model, 'named_modules', list)())
    assert [(n, type(m)) for n, m in modules.items()] == before
    assert not any(m._forward_pre_hooks for m in modules.values())


class Own(nn.Module):
    """A block of a user around timm's."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.block(x, **kwargs)


class OwnAttention(Attention):
    """A subclass, which may compute something else."""


def test_blocks_and_attentions_of_a_user() -> None:
    model = build(VIT, depth=3)
    model.blocks[0] = Own(model.blocks[0])
    model.blocks[1].attn = OwnAttention(32).double()
    model.blocks[2] = Own(nn.Identity())
    model.blocks[2].block.forward = lambda x, **_: x
    with pytest.raises(OptionError, match='OwnAttention'):
        linearize(model)
    record = linearize(model, [0])
    assert record.replaced == ['blocks.0.block.attn']
    reasons = {'blocks.1.attn': 'OwnAttention is', 'blocks.2': 'has no attention'}
    assert all(reasons[name] in reason for name, reason in record.left.items())
    assert record.left.keys() == reasons.keys()
    assert model(images(model)).isfinite().all()


class LowRank(nn.Module):
    """A projection with a term of rank 2, without the projection's weight."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False).to(base.weight)
        self.up = nn.Linear(2, base.out_features, bias=False).to(base.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def by_softmax(attention: nn.Module, x: Tensor, patch: pytest.MonkeyPatch) -> list[Tensor]:
    """Queries, keys and values of a source's attention."""
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        seen.extend(y.transpose(1, 2).flatten(2) for y in (q, k, v))
        return v

    with patch.context() as context:
        context.setattr(F, 'scaled_dot_product_attention', attend)
        attention(x)
    return seen


def by_ttt(attention: nn.Module, x: Tensor, **options) -> list[Tensor]:
    """Tokens, queries, keys and values of the inner training, on a map of one row."""
    seen: list[Tensor] = []
    attention.mix = lambda *args: seen.extend(args[:4]) or args[3]
    attention(x, hw=MapSize(1, x.shape[1] - attention.prefix), **options)
    return seen


@pytest.mark.parametrize('change', ['none', 'low rank', 'quantised', 'quantised before'])
@pytest.mark.parametrize('name', [VIT, BEIT, 'vit_small_patch16_dinov3_qkvb'])
@pytest.mark.filterwarnings('ignore')
def test_queries_keys_and_values_are_the_sources(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rotary positions the softmax does not show a bias of the keys."""
    source, x = build(name), noise(9, 32)[:, 0]
    attention = source.blocks[0].attn
    if name != VIT:
        nn.init.normal_(attention.k_bias)
    quantise = partial(torch.ao.quantization.quantize_dynamic, qconfig_spec={nn.Linear})
    if change.startswith('quantised'):
        # To 8 bits of weights and of tokens.
        source, x, tolerance = source.float(), x.float(), 0.02
    else:
        tolerance = 1e-12
    model = copy.deepcopy(source)
    if change == 'quantised before':
        model = quantise(model)
    linearize(model)
    if change == 'quantised':
        model = quantise(model)
    if change == 'low rank':
        # As PEFT wraps it.
        model.blocks[0].attn.qkv = wrapped = LowRank(model.blocks[0].attn.qkv)
        with torch.no_grad():
            attention.qkv.weight += wrapped.up.weight @ wrapped.down.weight
    tokens, *actual = by_ttt(model.blocks[0].attn, x)
    assert tokens is x
    for ours, theirs in zip(actual, by_softmax(attention, x, monkeypatch), strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize('name', [VIT, BEIT, 'q and k norms, rotary positions'])
def test_autocast_reaches_queries_keys_and_values(name: str) -> None:
    model = build(name).float()
    linearize(model)
    rope = model.rope.get_embed(shape=(1, 4)) if 'rotary' in name else None
    attention = model.blocks[0].attn
    if rope is not None:
        # As autocast on CUDA does.
        attention.q_norm.register_forward_hook(lambda *call: call[-1].float())
    with torch.autocast('cpu', torch.bfloat16):
        _, *actual = by_ttt(attention, torch.ones(1, attention.prefix + 4, 32), rope=rope)
    assert {y.dtype for y in actual} == {torch.bfloat16}


def test_dropout_is_the_sources() -> None:
    source = build(VIT, proj_drop_rate=0.5).train()
    model = copy.deepcopy(source)
    linearize(model, **SOFTMAX)
    outs = []
    for dropping in (source, model):
        torch.manual_seed(0)
        outs.append(dropping(images(source)))
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], source.eval()(images(source)))


@pytest.mark.parametrize('name', [BEIT, 'shared biases', 'vit_relpos_small_patch16_224'])
def test_models_of_one_size_get_another(name: str) -> None:
    model = build(name)
    linearize(model)
    model.set_input_size((32, 64))
    assert model(noise(32, 64)).isfinite().all()


def test_a_linearized_model_takes_all_tokens_once() -> None:
    model = build(VIT)
    linearize(model, [0])
    tokens = torch.zeros(1, 9, 32, dtype=torch.float64)
    for call in (
        lambda: linearize(model, [1]),
        lambda: model(images(model), attn_mask=torch.zeros(16, 16)),
        lambda: model(images(model), is_causal=True),
        lambda: model.blocks[0].attn(tokens[:, :7], hw=MapSize(2, 3), attn_mask=tokens),
        lambda: model.blocks[0](tokens, attn_mask=MapSize(3, 5)),
    ):
        with pytest.raises(OptionError):
            call()


@pytest.mark.parametrize('name', ['vit_small_patch16_dinov3', 'vit_small_patch14_reg4_dinov2'])
def test_a_folder_for_timm(name: str, tmp_path: Path) -> None:
    model = build(name).float()
    linearize(model, [0], inner=dict(type=INNER_MODELS['GatedFC']), key_norm=None)
    save_pretrained(model, tmp_path)
    again = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    x = images(model).float()
    assert torch.equal(again(x), model(x))
    # Written once more, from what was read.
    assert save_pretrained(again, tmp_path / 'b') == json.loads(
        (tmp_path / 'config.json').read_text()
    )
    # timm's own writer, which push_to_hf_hub uses.
    for source in (model, again):
        timm.models.save_for_hf(source, tmp_path / 'c')
        third = timm.create_model(f'local-dir:{tmp_path / "c"}', pretrained=True).eval()
        assert torch.equal(third(x), model(x))
    # Another head for other classes, as of all models of timm.
    tuned = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, num_classes=3).eval()
    assert tuned(x).shape == (2, 3)
    assert torch.equal(tuned.forward_features(x), model.forward_features(x))
    assert 'local-dir:FOLDER' in (tmp_path / 'README.md').read_text()


@pytest.mark.parametrize('name', [VIT, ROTARY, BEIT, 'vit_relpos_small_patch16_224'])
def test_a_folder_with_other_patches(name: str, tmp_path: Path) -> None:
    """timm resizes kernels in all but relpos models."""
    model = build(name).float()
    linearize(model)
    save_pretrained(model, tmp_path)
    load = partial(timm.create_model, f'local-dir:{tmp_path}', pretrained=True)
    kernel = model.patch_embed.proj.weight
    assert torch.equal(load().patch_embed.proj.weight, kernel)
    if 'relpos' not in name:
        half = load(patch_size=8, img_size=[n // 2 for n in model.patch_embed.img_size])
        expected = resample_patch_embed(kernel, [8, 8], verbose=False)
        torch.testing.assert_close(half.patch_embed.proj.weight, expected)


def test_a_folder_that_would_not_load_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save_pretrained(build('vit_tiny_patch16_224'), tmp_path)
    model = build('vit_tiny_patch16_224')
    linearize(model, key_norm=lambda k: k)
    with pytest.raises(OptionError, match='key_norm'):
        save_pretrained(model, tmp_path)
    model = build('vit_tiny_patch16_224')
    linearize(model)
    assert model.default_cfg is model.pretrained_cfg
    model.blocks[1].mlp.fc1 = nn.Linear(32, 7)
    with pytest.raises(UsageError, match=r'blocks\.1\.mlp\.fc1\.weight'):
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())
