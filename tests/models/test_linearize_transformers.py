"""TTT in transformers' vision models: which are taken, and what people do with them."""

import copy
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import interpolate
from torch.nn.parallel import DistributedDataParallel

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.deploy.export import export_module
from mmvttt.deploy.runtime import OnnxFile
from mmvttt.errors import OptionError, UsageError
from mmvttt.models.backbones import TimmViT
from mmvttt.models.distillation import distillation_losses, new_parameters
from mmvttt.models.linearize import linearize

from .building import SOFTMAX, shaken

T = pytest.importorskip('transformers', reason='needs transformers')
transformers = pytest.importorskip('mmvttt.models.linearize.transformers')
encoders = pytest.importorskip('mmvttt.models.linearize.encoders')

WIDTH = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
MLP = dict(WIDTH, intermediate_size=64)
VIT = dict(MLP, image_size=48, patch_size=8)
DINO = dict(WIDTH, image_size=48, patch_size=8, mlp_ratio=2)
TEXT = dict(MLP, vocab_size=20, max_position_embeddings=8)
LLAMA = T.LlamaConfig(**TEXT, num_key_value_heads=2)
GEMMA = T.GemmaConfig(**TEXT, num_key_value_heads=1, head_dim=16)
DINOV2 = T.Dinov2Config(**DINO, out_features=['stage1', 'stage2'], reshape_hidden_states=False)
DEPTH = dict(
    backbone_config=DINOV2, reassemble_hidden_size=32, neck_hidden_sizes=[16, 32], patch_size=8,
    reassemble_factors=[2, 1], fusion_hidden_size=16, head_in_index=-1, head_hidden_size=8,
)  # fmt: skip
DETR = dict(
    backbone_config=T.Dinov2Config(**DINO, out_features=['stage2']),
    use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=32,
    encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=4,
)  # fmt: skip
# Class, without Config; its options; tokens in front of the map and behind it; `where`.
TAKEN: dict[str, tuple[str, dict[str, Any], tuple[int, int], Any]] = {
    'ViT': ('ViTForImageClassification', VIT, (1, 0), 'all'),
    'DeiT': ('DeiTForImageClassification', VIT, (2, 0), 'all'),
    'Dinov2': ('Dinov2ForImageClassification', DINO, (1, 0), 'all'),
    'Dinov2WithRegisters': ('Dinov2WithRegistersModel', DINO, (5, 0), 'all'),
    'DINOv3ViT': ('DINOv3ViTModel', dict(VIT, num_register_tokens=4), (5, 0), 'all'),
    # Pairs of heads share keys in its second block.
    'Sapiens2': (
        'Sapiens2Model',
        dict(VIT, num_attention_heads=4, num_key_value_heads_per_layer=[4, 2]), (9, 0), 'all',
    ),
    'SiglipVision': ('SiglipVisionModel', VIT, (0, 0), 'all'),
    'CLIP': ('CLIPModel', dict(vision_config=VIT, text_config=TEXT), (1, 0), 'all'),
    'IJepa': ('IJepaForImageClassification', VIT, (0, 0), 'all'),
    'VitPoseBackbone': (
        'VitPoseBackbone', dict(VIT, image_size=[32, 48], patch_size=[8, 8]), (0, 0), 'all',
    ),
    'DPT': (
        'DPTForDepthEstimation',
        {
            **VIT, 'num_hidden_layers': 4, 'backbone_out_indices': [0, 1, 2, 3],
            'neck_hidden_sizes': [8] * 4, 'fusion_hidden_size': 8,
        },
        (1, 0), 'all',
    ),
    'DepthAnything': ('DepthAnythingForDepthEstimation', DEPTH, (1, 0), 'all'),
    'Yolos': (
        'YolosForObjectDetection', dict(VIT, image_size=[48, 48], num_detection_tokens=3),
        (1, 3), 'all',
    ),
    'Eomt': (
        'EomtForUniversalSegmentation',
        dict(DINO, num_blocks=1, num_queries=3, num_upscale_blocks=1), (5, 0), [0],
    ),
    'Llava': (
        'LlavaForConditionalGeneration',
        dict(vision_config=T.CLIPVisionConfig(**VIT), text_config=LLAMA, image_token_index=19),
        (1, 0), 'all',
    ),
    'PaliGemma': (
        'PaliGemmaForConditionalGeneration',
        dict(vision_config=T.SiglipVisionConfig(**VIT, projection_dim=32), text_config=GEMMA,
             image_token_index=19, projection_dim=32, hidden_size=32),
        (0, 0), 'all',
    ),
    'Detr': ('DetrForObjectDetection', DETR, (1, 0), 'all'),
}  # fmt: skip
# The same → a word of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    'Siglip2Vision': ('Siglip2VisionModel', dict(MLP, patch_size=8, num_patches=36), 'packed'),
    'Qwen2VL': (
        'Qwen2VLForConditionalGeneration',
        dict(
            vision_config=dict(depth=1, embed_dim=32, num_heads=2, hidden_size=32, patch_size=8),
            text_config=dict(MLP, vocab_size=20, num_key_value_heads=2,
                rope_scaling=dict(rope_type='default', mrope_section=[2, 3, 3])),
        ),
        'packed',
    ),
    'VideoMAE': ('VideoMAEModel', dict(VIT, num_frames=4), 'tubes'),
    'ViTMAE': ('ViTMAEModel', VIT, 'dropped'),
    'Beit': ('BeitModel', dict(VIT, use_relative_position_bias=True), 'biases'),
    'SamVision': (
        'SamVisionModel',
        dict(WIDTH, image_size=48, patch_size=8, mlp_dim=32, output_channels=8), 'outside',
    ),
    'Eomt': (
        'EomtForUniversalSegmentation',
        dict(DINO, num_blocks=1, num_queries=3, num_upscale_blocks=1), 'mask',
    ),
    'RfDetrDinov2': (
        'RfDetrDinov2Backbone',
        dict(WIDTH, image_size=64, patch_size=8, num_windows=2, out_features=['stage2']), 'windows',
    ),
    # A decoder with more queries than the small map has tokens.
    'MaskFormer': (
        'MaskFormerForInstanceSegmentation',
        dict(
            backbone_config=T.SwinConfig(
                image_size=64, embed_dim=24, depths=[1] * 4, num_heads=[2] * 4, window_size=4,
                out_features=['stage1', 'stage2', 'stage3', 'stage4'],
            ),
            fpn_feature_size=32, mask_feature_size=32,
        ),
        'not the patches',
    ),
    # Its own attentions are in a module of images, with no patches of theirs.
    'Detr': (
        'DetrModel',
        dict(DETR, backbone_config=T.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=['stage2'],
        )),
        'embeds their patches',
    ),
    'ViT': ('ViTModel', dict(VIT, attention_probs_dropout_prob=0.1), 'dropout'),
}  # fmt: skip


def build(name: str, linear: bool = True, **options: Any) -> Any:
    kind, config, _, where = TAKEN[name]
    torch.manual_seed(0)
    model = getattr(T, kind)(getattr(T, f'{name}Config')(**copy.deepcopy(config)))
    if linear:
        linearize(model, where, **options)
    return shaken(model)


def image(h: int = 48, w: int = 48, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, h, w, generator=torch.Generator().manual_seed(1))


def encoder(model: nn.Module) -> nn.Module:
    return model.get_submodule(
        next(
            iter({e.name for e in transformers.encoders(model).values() if not isinstance(e, str)})
        )
    )


def first(output: Any) -> Tensor:
    return next(y for y in output.to_tuple() if isinstance(y, Tensor))


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    """Tokens of the encoder, or the classes or the depth of a whole model."""
    whole = type(model).__name__.endswith(('Classification', 'DepthEstimation', 'Detection'))
    output = (model if whole else encoder(model))(pixel_values=images)
    return output.feature_maps[-1] if 'feature_maps' in output else first(output)


@pytest.mark.parametrize('name', TAKEN)
def test_a_family(name: str, tmp_path: Path) -> None:
    """Softmax put back, gradients, and a folder, of each family's own class."""
    *_, layout, where = TAKEN[name]
    side = (32, 48) if name == 'VitPoseBackbone' else (48, 48)
    source, same = build(name, linear=False), build(name, linear=False)
    record = linearize(same, where, **SOFTMAX)
    x = image(*side)
    # fp32, the same sums in another order.
    torch.testing.assert_close(outputs(same, x), outputs(source, x), rtol=1e-4, atol=1e-4)
    assert not record.gone
    model = build(name)
    layers = [m for m in model.modules() if isinstance(m, transformers.TTT)]
    assert {m.layout for m in layers} == {layout}
    assert model.num_prefix_tokens == layout[0]
    assert all(f'{n}.{transformers.LAYER}.inner.w1' in model.state_dict() for n in record.replaced)
    assert not [n for n in record.replaced if 'language' in n or 'text' in n or 'decoder' in n]
    y = outputs(model, x)
    y.square().mean().backward()
    new = new_parameters(model)
    # A class token's score needs no queries of the last map, and shallow necks only the last block.
    gradients = [n for n, p in model.named_parameters() if n in new and p.grad is not None]
    assert len(gradients) == len(new)
    assert y.isfinite().all()
    missing = model.load_state_dict(source.state_dict(), strict=False)
    assert {*missing.missing_keys} == new
    assert not missing.unexpected_keys
    y = outputs(model, x)
    model.save_pretrained(tmp_path)
    again = transformers.from_pretrained(getattr(T, TAKEN[name][0]), tmp_path).eval()
    assert torch.equal(outputs(again, x), y)


@pytest.mark.parametrize('name', REFUSED)
def test_what_cannot_be_right_is_refused(name: str) -> None:
    kind, options, reason = REFUSED[name]
    model = getattr(T, kind)(getattr(T, f'{name}Config')(**options))
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(OptionError, match=reason):
        linearize(model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert model.training
    assert 'mmvttt' not in model.config.to_json_string()


def test_what_an_encoder_is_told_by() -> None:
    source = T.ViTModel(T.ViTConfig(**VIT, num_channels=1, hidden_dropout_prob=0.5))
    # A later convolution of images, and an attention that sees only tokens before its own.
    source.later = nn.Conv2d(1, 8, 8, 8)
    source.layers[1].attention.is_causal = True
    source.spare = copy.deepcopy(source.layers[0].attention)
    x, same = image()[:, :1], copy.deepcopy(source)
    # The weights are not copied for it.
    same.embeddings.cls_token.__deepcopy__ = lambda memo: pytest.fail('a copy')
    state = torch.get_rng_state()
    encoders.layouts(same, 'embeddings.patch_embeddings.projection')
    assert torch.equal(torch.get_rng_state(), state)
    record = linearize(same, [0], **SOFTMAX)
    assert record.replaced == ['layers.0.attention']
    assert record.left == {'layers.1.attention': 'it is causal', 'spare': encoders._NO_CALL}
    assert same.training
    expected = first(source.eval()(x))
    torch.testing.assert_close(first(same.eval()(x)), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(OptionError, match='causal'):
        linearize(source, where='layers.1.attention')
    # Called a second time, with fewer tokens.
    attention = source.layers[0].attention
    handle = attention.register_forward_hook(lambda m, args, _: m.forward(args[0][:, 1:]) and None)
    with pytest.raises(OptionError, match='another order'):
        linearize(source, [0])
    handle.remove()
    source.config.image_size = []
    attention.forward = lambda *_: 1 / 0
    with pytest.raises(OptionError, match=r'\(64×128: division by zero\)'):
        linearize(source, [0])


def test_two_encoders_have_notes_of_their_own() -> None:
    class Pair(T.PreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.left, self.right = (T.ViTModel(copy.deepcopy(config)) for _ in range(2))

    pair = Pair(T.ViTConfig(**VIT))
    linearize(pair, ['left.layers.0.attention', 'right.layers.1.attention'])
    for part, name in ((pair.left, 'layers.0.attention'), (pair.right, 'layers.1.attention')):
        assert part.config.linearize['tokens'] == {name: [1, 0]}
        assert first(part(image())).isfinite().all()


def test_tokens_are_where_their_patches_show() -> None:
    shown = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]]).bool()
    tokens = 1e3 * torch.randn(1, 1, 6, 2) + 0.01 * torch.randn(5, 1, 6, 2)
    for places, layout in (([1, 2, 3, 4], (1, 1)), ([0, 1, 3, 4], encoders._ORDER)):
        x = tokens.clone()
        x[1:, 0, places] += 1e3 * shown[:, :, None]
        assert encoders._layout((x, x, x), shown) == layout


def test_an_encoder_runs_on_images_of_any_size() -> None:
    x = image(48, 64)
    for name in ('ViT', 'Dinov2'):
        assert first(encoders.run(encoder(build(name)), x)).isfinite().all()

    class Plain(nn.Module):
        config = SimpleNamespace(image_size=48)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return pixel_values

    assert encoders.run(Plain(), x) is x


def renamed(source: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Weights of transformers' layers under the names of timm's blocks."""
    theirs = {
        n: n.replace('blocks.', 'layers.').replace('.attn.', f'.attention.{transformers.LAYER}.')
        for n in names
    }
    return {name: source.state_dict()[other] for name, other in theirs.items()}


@pytest.mark.parametrize(('h', 'w'), [(48, 48), (32, 64), (64, 32)])
def test_the_twin_of_timm_gives_the_same_tokens(h: int, w: int, tmp_path: Path) -> None:
    config = T.ViTConfig(**dict(VIT, image_size=(h, w), layer_norm_eps=1e-6))
    source = shaken(T.ViTModel(config))
    source.save_pretrained(tmp_path)
    options = dict(
        img_size=(h, w), patch_size=8,
        model_options=dict(embed_dim=32, depth=2, num_heads=2, mlp_ratio=2),
    )  # fmt: skip
    twin = TimmViT('vit_small_patch16_224', linearize=dict(), **options).eval().double()
    load_pretrained(twin, tmp_path)
    linearize(source.double())
    twin.load_state_dict(renamed(source, [*new_parameters(twin)]), strict=False)
    x, hw = twin.embed(image(h, w).double())
    for i in range(2):
        x = twin.run_block(i, x, hw)
    actual = source(image(h, w).double()).last_hidden_state
    torch.testing.assert_close(twin.norm(x), actual, rtol=1e-6, atol=1e-6)


def test_configs_say_how_a_model_is_linearized(tmp_path: Path) -> None:
    model = build('DepthAnything', inner=dict(type='MLP', ratio=2), key_norm='rms')
    model.save_pretrained(tmp_path)
    auto = T.AutoModelForDepthEstimation
    x = image(48, 64)
    again = transformers.from_pretrained(auto, tmp_path).eval()
    assert torch.equal(again(x).predicted_depth, model(x).predicted_depth)
    # The backbone has it from its own config.
    model.backbone.save_pretrained(tmp_path / 'backbone')
    backbone = transformers.from_pretrained(T.AutoBackbone, tmp_path / 'backbone').eval()
    assert torch.equal(backbone(x).feature_maps[-1], model.backbone(x).feature_maps[-1])
    # As a softmax model, with mmvttt and without.
    with pytest.raises(UsageError, match='from_pretrained'):
        auto.from_pretrained(tmp_path)(x)
    process = loaded_without_mmvttt(auto, tmp_path)
    assert process.returncode
    assert 'mmvttt.models.linearize.transformers' in process.stderr.splitlines()[-1]
    # The source's weights.
    source = build('DepthAnything', linear=False)
    source.save_pretrained(tmp_path / 'source')
    with pytest.raises(OptionError, match='linearize'):
        transformers.from_pretrained(auto, tmp_path / 'source')
    with pytest.raises(OptionError, match='no class'):
        transformers.from_pretrained(T.AutoModelForImageClassification, tmp_path)
    again = type(model).from_pretrained(tmp_path / 'source', config=model.config)
    for name, parameter in again.named_parameters():
        if name in new_parameters(again):
            assert 0 < parameter.abs().max() < 10
        else:
            assert torch.equal(parameter, source.state_dict()[name]), name
    config = tmp_path / 'backbone' / 'config.json'
    for old, new in (('"MLP"', '"os.system"'), ('layer.0.', 'layer.7.')):
        text = config.read_text()
        config.write_text(text.replace(old, new))
        with pytest.raises(OptionError, match=new.strip('"')):
            transformers.from_pretrained(T.AutoBackbone, tmp_path / 'backbone')
        config.write_text(text)


def loaded_without_mmvttt(source: type, folder: Path, **options: Any) -> Any:
    load = f'transformers.{source.__name__}.from_pretrained({str(folder)!r}, **{options})'
    code = f'import sys, transformers; {load}; assert "mmvttt.models" not in sys.modules'
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)


def test_another_attention_is_asked_for(tmp_path: Path) -> None:
    """By our classes with a warning, and by transformers' with its list of unread weights."""
    model, x = build('DepthAnything'), image(48, 64)
    expected = model(x).predicted_depth
    model.save_pretrained(tmp_path)
    auto = T.AutoModelForDepthEstimation
    for load in (partial(transformers.from_pretrained, auto), type(model).from_pretrained):
        with pytest.warns(UserWarning, match='only its other attentions'):
            again = load(tmp_path, attn_implementation='eager')
        assert torch.equal(again.eval()(x).predicted_depth, expected)
    with pytest.warns(UserWarning, match='only its other attentions'):
        again.set_attn_implementation('eager')
    assert torch.equal(again(x).predicted_depth, expected)
    options = dict(attn_implementation='eager', output_loading_info=True)
    _, report = auto.from_pretrained(tmp_path, **options)
    assert {*report['unexpected_keys']} == new_parameters(model)


def test_a_part_is_linearized(tmp_path: Path) -> None:
    model, x = build('DepthAnything', linear=False), image(48, 64)
    linearize(model.backbone)
    expected = model(x).predicted_depth
    model.activation_checkpointing_enable()
    with pytest.raises(OptionError, match='linearize the whole model'):
        model.train()(x).predicted_depth.sum().backward()
    model.eval().save_pretrained(tmp_path)
    auto = T.AutoModelForDepthEstimation
    again = transformers.from_pretrained(auto, tmp_path).eval()
    assert torch.equal(again(x).predicted_depth, expected)
    # The whole has transformers' class, which loads a softmax model. Its report says by whom the
    # weights are that it does not expect.
    name = f'attention.{transformers.LAYER}.inner.w1'
    for options in ({}, dict(attn_implementation='eager')):
        process = loaded_without_mmvttt(auto, tmp_path, **options)
        assert not process.returncode
        assert any(name in row and 'UNEXPECTED' in row for row in process.stderr.splitlines())


@pytest.mark.parametrize('device_map', ['cpu', 'auto'])
def test_a_model_of_the_hub(
    device_map: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip('accelerate')
    hub = 'transformers.utils.hub'
    api = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    card = SimpleNamespace(save=lambda path: Path(path).write_text('a card'))
    monkeypatch.setattr(f'{hub}.hf_api', lambda: api)
    monkeypatch.setattr(f'{hub}.create_and_tag_model_card', lambda *_, **__: card)
    monkeypatch.setattr(
        f'{hub}.PushToHubMixin._upload_modified_files',
        lambda _, folder, name, **__: shutil.copytree(folder, tmp_path / name),
    )
    model, x = build('DepthAnything'), image(48, 64)
    model.push_to_hub('somebody/linear')
    again = transformers.from_pretrained(
        T.AutoModelForDepthEstimation, tmp_path / 'somebody/linear', device_map=device_map
    )
    assert {value.device.type for value in again.state_dict().values()} == {'cpu'}
    assert torch.equal(again.eval()(x).predicted_depth, model(x).predicted_depth)


def _gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor | None]:
    model(pixel_values=images).logits.square().mean().backward()
    return {n.removeprefix('module.'): p.grad for n, p in model.named_parameters()}


def _rank(rank: int, folder: Path) -> None:
    dist.init_process_group('gloo', f'file://{folder}/store', rank=rank, world_size=2)
    model = DistributedDataParallel(build('ViT'))
    torch.save(_gradients(model, image(batch=4)[2 * rank :][:2]), folder / f'{rank}.pth')
    dist.destroy_process_group()


def test_two_ranks_have_the_gradients_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ranks import this module; mmvttt is the installed one.
    monkeypatch.setattr(sys, 'path', [*sys.path, str(Path(__file__).parents[2])])
    torch.multiprocessing.spawn(_rank, (tmp_path,), nprocs=2)
    expected = _gradients(build('ViT'), image(batch=4))
    for rank in range(2):
        # fp32, the same sums in another order.
        actual = torch.load(tmp_path / f'{rank}.pth')
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_what_a_linearized_attention_does_not_have() -> None:
    model, x = build('ViT'), image()
    tokens = torch.ones(2, 37)
    expected = model(x).logits
    with pytest.raises(OptionError, match='output_attentions'):
        model(x, output_attentions=True)
    eager = T.ViTModel(T.ViTConfig(**VIT, attn_implementation='eager', output_attentions=True))
    linearize(eager)
    with pytest.raises(OptionError, match='output_attentions'):
        eager(x)
    # Masks are Boolean, then added to scores.
    for kind in ('sdpa', 'eager'):
        with pytest.warns(UserWarning, match='only its other attentions'):
            model.set_attn_implementation(kind)
        assert model.config._attn_implementation == kind
        with pytest.raises(OptionError, match='mask'):
            model(x, attention_mask=tokens.tril())
        for full in (tokens, torch.ones(2, 1, 37, 37).bool(), torch.zeros(2, 1, 37, 37)):
            assert torch.equal(model(x, attention_mask=full).logits, expected)
    with pytest.raises(OptionError, match='size of its map'):
        model.vit.layers[0](torch.randn(1, 37, 32))
    with pytest.raises(AttributeError, match='NoneType'):
        model.vit()
    scores = ('position_bias', 'softcap', 's_aux', 'sliding_window', 'cu_seq_lens_q', 'cache')
    for name in ('is_causal', *scores):
        with pytest.raises(OptionError, match=name):
            model(x, **{name: 1})
    dropped = copy.deepcopy(model)
    dropped.vit.embeddings.register_forward_hook(lambda *args: args[-1][:, :-1])
    with pytest.raises(OptionError, match='36 tokens'):
        dropped(x)
    for mistake in (lambda: linearize(model), lambda: build('ViT', step='dynamic')):
        with pytest.raises(OptionError):
            mistake()
    with pytest.raises(OptionError, match='weights'), torch.device('meta'):
        linearize(T.ViTModel(T.ViTConfig(**VIT)))


def test_an_export_takes_no_mask() -> None:
    """Whether a mask is full is no question to a graph."""
    config = T.SmolVLMConfig(vision_config=dict(VIT), text_config=LLAMA, scale_factor=2)
    model = T.SmolVLMModel(config).vision_model.eval()
    linearize(model)
    inputs = dict(pixel_values=image(), patch_attention_mask=torch.ones(2, 6, 6).bool())
    assert first(model(**inputs)).isfinite().all()
    with pytest.raises(OptionError, match='patch_attention_mask'):
        torch.export.export(model, (), inputs)
    with pytest.raises(OptionError, match='mask'):
        model(**{**inputs, 'patch_attention_mask': torch.ones(2, 6, 6).tril().bool()})


@pytest.mark.parametrize('name', ['ViT', 'SiglipVision', 'DepthAnything', 'Yolos'])
def test_the_size_of_a_map_is_of_its_call(name: str) -> None:
    """Threads, copies, recomputation of two images in flight, and a call that fails."""
    model = build(name)
    square = name in ('SiglipVision', 'ViT')
    images = [image(48, 48)] * 2 if square else [image(32, 64, 1), image(64, 32, 1)] * 2
    expected = [outputs(model, x) for x in images]
    results: dict[int, Tensor] = {}
    threads = [
        Thread(target=lambda i=i, x=x: results.update({i: outputs(model, x)}))
        for i, x in enumerate(images)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[i], y) for i, y in enumerate(expected))
    # transformers' backbones and capturing hooks cannot be pickled.
    again = [pickle.loads(pickle.dumps(build(name)))] if name == 'ViT' else []
    for same in (copy.deepcopy(model), *again):
        assert torch.equal(outputs(same, images[0]), expected[0])
    gradients = []
    for reentrant in (None, False, True):
        twin = copy.deepcopy(model).train()
        if reentrant is not None:
            twin.activation_checkpointing_enable(dict(use_reentrant=reentrant))
        inputs = [x.clone().requires_grad_() for x in images]
        losses = [outputs(twin, x).square().mean() for x in inputs]
        for loss in losses:
            loss.backward()
        gradients.append({n: p.grad for n, p in twin.named_parameters() if p.grad is not None})
    for actual in gradients[1:]:
        for key, gradient in gradients[0].items():
            torch.testing.assert_close(actual[key], gradient, rtol=1e-5, atol=1e-7)
    with pytest.raises((RuntimeError, ValueError)):
        outputs(model, image(48, 48)[:, :2])
    assert transformers._current() is None


@pytest.mark.parametrize('name', ['ViT', 'SiglipVision', 'DINOv3ViT', 'DepthAnything'])
def test_compiled_and_exported(name: str, tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime')
    model, x = build(name), image(48, 48)
    compiled = torch.compile(model, fullgraph=True, backend='eager')
    torch.testing.assert_close(outputs_of(compiled, x), outputs_of(model, x))
    model.train().activation_checkpointing_enable()
    gradients = []
    for call in (model, torch.compile(model, fullgraph=True, backend='eager')):
        model.zero_grad()
        # DINOv3 draws a scale of its positions.
        torch.manual_seed(0)
        outputs_of(call, x).square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    # fp32, the same sums in another order.
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    model.eval().activation_checkpointing_disable()
    with torch.autocast('cpu', torch.bfloat16):
        torch.testing.assert_close(outputs_of(model, x), outputs_of(model, x))
    half = copy.deepcopy(model).bfloat16()
    assert outputs_of(half, x.bfloat16()).dtype == torch.bfloat16
    if name != 'DepthAnything':
        return
    exported = export_module(_Tensors(model).eval(), x, tmp_path / 'a.onnx', fixed_size=True)
    torch.testing.assert_close(
        torch.as_tensor(exported(x)[0]), outputs_of(model, x), rtol=1e-3, atol=1e-4
    )
    # torch's own door, which has a table of torch's operators only.
    path = tmp_path / 'b.onnx'
    torch.onnx.export(model, (x,), path, input_names=['image'], dynamo=True, verbose=False)
    torch.testing.assert_close(
        torch.as_tensor(OnnxFile(path)(x)[0]), outputs_of(model, x), rtol=1e-3, atol=1e-4
    )


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    return first(model(pixel_values=x))


class _Tensors(nn.Module):
    """A model of transformers as a function of images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x, return_dict=False)[0]


def test_a_pipeline() -> None:
    processor = T.DPTImageProcessor(
        size=dict(height=48, width=48), ensure_multiple_of=8, keep_aspect_ratio=True
    )
    picture = Image.fromarray(np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3))
    model = build('DepthAnything')
    depth = T.pipeline('depth-estimation', model=model, image_processor=processor)(picture)
    x = processor(picture, return_tensors='pt').pixel_values
    expected = interpolate(model(x).predicted_depth[:, None], (40, 60), mode='bicubic')[0, 0]
    torch.testing.assert_close(depth['predicted_depth'], expected, rtol=1e-3, atol=1e-4)


def test_a_trainer_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder of tests is called datasets.
    monkeypatch.setattr('transformers.trainer.is_datasets_available', lambda: False)
    data = [dict(pixel_values=image()[0], labels=i % 2) for i in range(4)]

    def train(folder: str, resume: bool = False, steps: int = 2, **options: Any) -> Any:
        arguments = T.TrainingArguments(
            str(tmp_path / folder), max_steps=steps, save_steps=1, report_to=[], use_cpu=True,
            per_device_train_batch_size=2, lr_scheduler_type='constant', optim='sgd', **options,
        )  # fmt: skip
        trainer = T.Trainer(build('ViT'), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    whole = train('whole', gradient_checkpointing=True)
    train('parts', steps=1)
    parts = train('parts', resume=True)
    for name, tensor in parts.items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5)
    again = transformers.from_pretrained(
        T.AutoModelForImageClassification, tmp_path / 'parts' / 'checkpoint-2'
    )
    assert all(torch.equal(tensor, parts[name]) for name, tensor in again.state_dict().items())


def test_peft_trains_what_is_new() -> None:
    peft = pytest.importorskip('peft')
    model = build('ViT', linear=False)
    record = linearize(model)
    options = dict(target_modules=['q_proj'], modules_to_save=record.modules_to_save)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    adapted(pixel_values=image()).logits.square().mean().backward()
    trained = [n for n, p in adapted.named_parameters() if p.grad is not None]
    assert sum(f'.{transformers.LAYER}.modules_to_save.' in n for n in trained) == len(record.new)


def test_distillation_of_an_encoder() -> None:
    source, twin = build('DepthAnything', linear=False), build('DepthAnything')
    losses = distillation_losses(source, twin, image())
    assert {'explained_0', 'explained_1', 'explained_last'} < losses.keys()
    losses['loss_distil'].backward()
    same = build('DepthAnything', linear=False)
    linearize(same, **SOFTMAX)
    assert distillation_losses(source, same, image())['explained_last'] > 0.9999


@pytest.mark.parametrize('page', ['t5', 'distil'])
def test_the_examples_of_the_pages(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / 'docs' / f'{page}.md').read_text()
    _, _, block = text.partition('<!-- run: with transformers -->\n```python\n')
    exec(compile(block.partition('```')[0], page, 'exec'), {})
    assert (tmp_path / 'linear' / 'config.json').is_file()
