"""TTT in diffusers' transformers: files, processors, counts of SD3.5-T⁵."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmvttt.errors import OptionError, UsageError
from mmvttt.models.layers.inner_models import SwiGLU
from mmvttt.models.linearize import linearize

from .building import shaken

diffusers = pytest.importorskip('diffusers', reason='the extra `gen` is not installed')
saved = pytest.importorskip('mmvttt.models.linearize.saved')
DiT, Flux = diffusers.DiTTransformer2DModel, diffusers.FluxTransformer2DModel

SMALL = dict(num_attention_heads=2, attention_head_dim=16)
JOINT = dict(SMALL, joint_attention_dim=24, pooled_projection_dim=20)
CONFIGS: dict[str, tuple[type, dict]] = {
    'DiT': (DiT, dict(SMALL, out_channels=8, num_layers=3, sample_size=8, num_embeds_ada_norm=10)),
    # Two blocks with joint and self-attention, one joint, and one without output for the text.
    'SD3': (
        diffusers.SD3Transformer2DModel,
        dict(
            JOINT,
            sample_size=16,
            num_layers=4,
            caption_projection_dim=32,
            pos_embed_max_size=24,
            dual_attention_layers=(0, 1),
            qk_norm='rms_norm',
        ),
    ),
    # Self-attention, and cross-attention to the text, which stays.
    'PixArt': (
        diffusers.PixArtTransformer2DModel,
        dict(SMALL, num_layers=2, cross_attention_dim=32, sample_size=8, caption_channels=24),
    ),
    # Two joint blocks and two of one stream.
    'Flux': (
        Flux,
        dict(JOINT, in_channels=4, num_layers=2, num_single_layers=2, axes_dims_rope=(4, 4, 8)),
    ),
}


def build(name: str) -> nn.Module:
    kind, options = CONFIGS[name]
    return shaken(kind(**options).double())


def map_ids(h: int, w: int) -> torch.Tensor:
    """Picture, row and column of each token of a map."""
    rows, columns = (i.flatten() for i in torch.meshgrid(*map(torch.arange, (h, w)), indexing='ij'))
    return torch.stack([torch.zeros(h * w), rows, columns], 1)


def inputs(name: str, h: int = 12, w: int = 20) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    text = dict(encoder_hidden_states=noise(2, 7, 24), pooled_projections=noise(2, 20))
    time = dict(timestep=torch.tensor([3, 700]))
    if name == 'DiT':
        # Square: what diffusers makes of the tokens is.
        return dict(hidden_states=noise(2, 4, 8, 8), **time, class_labels=torch.tensor([1, 4]))
    if name == 'PixArt':
        del text['pooled_projections']
        sizes = dict(resolution=None, aspect_ratio=None)
        return dict(hidden_states=noise(2, 4, h, w), **text, **time, added_cond_kwargs=sizes)
    if name == 'Flux':
        h, w = h // 4, w // 4
        time = dict(timestep=torch.tensor([0.3, 0.7], dtype=torch.float64))
        ids = dict(img_ids=map_ids(h, w), txt_ids=torch.zeros(7, 3))
        return dict(hidden_states=noise(2, h * w, 4), **text, **time, **ids)
    return dict(hidden_states=noise(2, 16, h, w), **text, **time)


def numbered(name: str, model: nn.Module, number: int) -> dict[str, torch.Tensor]:
    """Inputs of which odd ones have the map turned."""
    actual = inputs(name, *((20, 12) if number % 2 else (12, 20)))
    return actual | dict(hidden_states=actual['hidden_states'] + 0.1 * number)


LOADERS = {name: getattr(saved, kind.__name__) for name, (kind, _) in CONFIGS.items()}
each = pytest.mark.parametrize('name', CONFIGS)


@each
def test_saved_and_loaded_by_diffusers(name: str, tmp_path: Path, caplog) -> None:
    # dit5 names all attentions; joint ones have no window.
    options = dict(neighborhood=None) if name in ('SD3', 'Flux') else {}
    model = build(name)
    linearize(model, 'dit5', **options)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, 'diffusers'):
        loaded = LOADERS[name].from_pretrained(tmp_path, torch_dtype=torch.float64)
        assert torch.equal(loaded(**inputs(name)).sample, loaded(**inputs(name)).sample)
    assert 'not expected' not in caplog.text
    assert type(loaded) is LOADERS[name]
    assert isinstance(loaded, type(model))
    weights = model.state_dict()
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(w, weights[n]) for n, w in loaded.state_dict().items())
    expected = model(**inputs(name)).sample
    for other in (loaded, copy.deepcopy(loaded)):
        # Other memory may have another alignment, and sums another order: fp64.
        torch.testing.assert_close(other(**inputs(name)).sample, expected, rtol=0, atol=1e-12)
    build(name).save_pretrained(tmp_path / 'plain')
    with pytest.raises(OptionError):
        LOADERS[name].from_pretrained(tmp_path / 'plain')


@pytest.mark.parametrize('loader', ['DiTPipeline', 'DiffusionPipeline'])
def test_a_pipeline_loads_again(loader: str, tmp_path: Path) -> None:
    transformer = build('DiT').float()
    linearize(transformer, 'dit5')
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    pipeline = diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler())
    # Twice: the folder of a loaded one is as good.
    for folder in (tmp_path / 'once', tmp_path / 'twice'):
        pipeline.save_pretrained(folder)
        pipeline = getattr(diffusers, loader).from_pretrained(folder)
    weights = transformer.state_dict()
    assert pipeline.transformer.state_dict().keys() == weights.keys()
    assert all(torch.equal(w, weights[n]) for n, w in pipeline.transformer.state_dict().items())
    x = {n: v.float() if v.is_floating_point() else v for n, v in inputs('DiT').items()}
    with torch.no_grad():
        expected = transformer(**x).sample
        # fp32, other memory.
        torch.testing.assert_close(pipeline.transformer(**x).sample, expected, rtol=1e-5, atol=1e-5)


# Public methods of diffusers that put other processors into a model.
REPLACING = {
    'set_attn_processor': lambda m: m.set_attn_processor(
        diffusers.models.attention_processor.JointAttnProcessor2_0()
    ),
    'fuse_qkv_projections': lambda m: m.fuse_qkv_projections(),
}


@pytest.mark.parametrize('method', REPLACING)
def test_other_processors_are_refused(method: str, tmp_path: Path) -> None:
    model = build('SD3')
    linearize(model)
    processors = dict(model.attn_processors)
    expected = model(**inputs('SD3')).sample
    REPLACING[method](model)
    with pytest.raises(UsageError):
        model(**inputs('SD3'))
    with pytest.raises(UsageError):
        model.save_pretrained(tmp_path)
    if method == 'fuse_qkv_projections':
        model.unfuse_qkv_projections()
    else:
        model.set_attn_processor(processors)
    assert torch.equal(model(**inputs('SD3')).sample, expected)


def test_partly_linearized_without_a_warning(caplog) -> None:
    model = build('SD3')
    linearize(model, ['transformer_blocks.0.attn2'])
    with caplog.at_level(logging.WARNING, 'diffusers'):
        model(**inputs('SD3'))
        # A user's arguments for the processors are passed on, by place or by name.
        told = dict(inputs('SD3'), joint_attention_kwargs={})
        model(*[told[n] for n in (*list(inputs('SD3')),)], None, {})
        model(**told)
    assert not caplog.records


def test_options_that_no_config_can_hold() -> None:
    model = build('SD3')
    before = [(n, type(m)) for n, m in model.named_modules()]
    with pytest.raises(OptionError):
        linearize(model, inner=dict(type=type('Own', (SwiGLU,), {})))
    assert [(n, type(m)) for n, m in model.named_modules()] == before
    assert 'linearize' not in model.config


def test_cross_attention_stays() -> None:
    model = build('PixArt')
    record = linearize(model)
    assert record.replaced == ['transformer_blocks.0.attn1', 'transformer_blocks.1.attn1']
    assert set(record.left.values()) == {'it is cross-attention'}
    assert record.modules_to_save == ['inner', 'k_conv', 'q_conv']
    with pytest.raises(OptionError):
        linearize(build('PixArt'), ['transformer_blocks.0.attn2'])


def test_a_caller_tells_flux_its_map() -> None:
    """Otherwise the rows and columns of the tokens do, whose greatest are read."""
    model, x = build('Flux'), inputs('Flux')
    linearize(model)
    expected = model(**x).sample
    told = dict(x, joint_attention_kwargs=dict(map_size=(3, 5)))
    assert torch.equal(model(**told).sample, expected)
    turned = dict(x, joint_attention_kwargs=dict(map_size=(5, 3)))
    assert not torch.equal(model(**turned).sample, expected)
    with pytest.raises(OptionError):
        model(**dict(x, joint_attention_kwargs=dict(map_size=(3, 4))))
    second = x['img_ids'].clone()
    second[..., -1, 0] = 1
    for ids in (second, x['img_ids'].flip(-2), torch.cat([map_ids(4, 6), map_ids(2, 12)])):
        tokens = torch.randn(2, len(ids), x['hidden_states'].shape[-1])
        with pytest.raises(OptionError):
            model(**dict(x, img_ids=ids, hidden_states=tokens.to(x['hidden_states'])))


def macs(model: nn.Module, **x: torch.Tensor) -> float:
    """10⁹ multiply-accumulates."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**x)
    return counter.get_total_flops() / 2e9


def test_counts_of_sd35_t5() -> None:
    """SD3.5-Medium from its published config: 18 of 37 attentions, and FLOPs by image size."""
    with torch.device('meta'):
        source = diffusers.SD3Transformer2DModel(
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
            qk_norm='rms_norm',
        )
    model = copy.deepcopy(source)
    record = linearize(model, 'sd3.5-t5')
    assert (len(record.replaced), len(record.left)) == (18, 19)
    assert record.kept / 1e6 == pytest.approx(2243.17, abs=0.005)
    assert record.added == 18 * 227_328
    # The counts are polynomials of second degree in the tokens: the third size says no more.
    for side, softmax, linear in ((512, 1221.3, 1165.5), (2048, 44692, 29891.5)):
        x = dict(
            hidden_states=torch.empty(1, 16, side // 8, side // 8, device='meta'),
            encoder_hidden_states=torch.empty(1, 333, 4096, device='meta'),
            pooled_projections=torch.empty(1, 2048, device='meta'),
            timestep=torch.zeros(1, device='meta'),
        )
        assert macs(source, **x) == pytest.approx(softmax, abs=0.06)
        assert macs(model, **x) == pytest.approx(linear, abs=0.06)


def test_bad_input() -> None:
    model = build('DiT')
    linearize(model)
    attention = model.transformer_blocks[0].attn1
    for call in (
        lambda: linearize(model),
        lambda: model.forward(**inputs('DiT')),
        lambda: attention(torch.zeros(1, 4, 32), attention_mask=torch.zeros(1, 4)),
    ):
        with pytest.raises(OptionError):
            call()
    cross = build('SD3')
    cross.transformer_blocks[0].attn.set_processor(
        diffusers.models.attention_processor.PAGJointAttnProcessor2_0()
    )
    with pytest.raises(OptionError):
        linearize(cross)
