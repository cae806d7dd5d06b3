"""transformers' own modules with random weights compute what timm's do with their files."""

from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmvttt.checkpoints import sources
from mmvttt.checkpoints.families import timm_names
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.read import open_checkpoint
from mmvttt.errors import CheckpointError, CheckpointMismatchError, CheckpointMissingError
from mmvttt.models.backbones import T5, TimmViT
from mmvttt.models.inherit import load_inherited, load_inherited_head

from ..models.building import shaken

WIDTH = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
SIZES = dict(WIDTH, intermediate_size=64, image_size=48, patch_size=8)
DINO = dict(WIDTH, image_size=48, patch_size=8, mlp_ratio=2)
# Options of timm's model of the same size.
TIMM = dict(embed_dim=32, depth=2, num_heads=2)
SMALL = dict(TIMM, mlp_ratio=2)


def built(kind: str, config: str, options: dict) -> nn.Module:
    module = pytest.importorskip('transformers', reason='compares with transformers')
    return shaken(getattr(module, kind)(getattr(module, config)(**options)), scale=0.3)


# transformers' class, config and options; timm's model, its options; the part that is compared.
CASES: dict[str, tuple[str, str, dict, str, dict, str]] = {
    'DINOv2': (
        'Dinov2Model', 'Dinov2Config', DINO,
        'vit_small_patch14_dinov2', dict(SMALL, init_values=1), '',
    ),
    'DINOv2 giant': (
        'Dinov2Model', 'Dinov2Config', dict(DINO, use_swiglu_ffn=True),
        'vit_giant_patch14_dinov2', dict(TIMM, mlp_ratio=3, init_values=1), '',
    ),
    'DINOv2 classifier': (
        'Dinov2ForImageClassification', 'Dinov2Config', DINO,
        'vit_small_patch14_dinov2', dict(SMALL, init_values=1), 'dinov2',
    ),
    'DINOv2 with registers': (
        'Dinov2WithRegistersModel', 'Dinov2WithRegistersConfig', DINO,
        'vit_small_patch14_reg4_dinov2', dict(SMALL, init_values=1), '',
    ),
    'DINOv3': (
        'DINOv3ViTModel', 'DINOv3ViTConfig', dict(SIZES, num_register_tokens=4),
        'vit_small_patch16_dinov3_qkvb', SMALL, '',
    ),
    'DINOv3 without biases': (
        'DINOv3ViTModel', 'DINOv3ViTConfig',
        dict(SIZES, num_register_tokens=4, query_bias=False, value_bias=False),
        'vit_small_patch16_dinov3', SMALL, '',
    ),
    'DINOv3 plus': (
        'DINOv3ViTModel', 'DINOv3ViTConfig',
        dict(SIZES, num_register_tokens=4, use_gated_mlp=True, hidden_act='silu'),
        'vit_small_plus_patch16_dinov3_qkvb', dict(SMALL, swiglu_align_to=8), '',
    ),
    'SigLIP': (
        'SiglipVisionModel', 'SiglipVisionConfig', dict(SIZES, hidden_act='gelu_pytorch_tanh'),
        'vit_base_patch16_siglip_gap_224', dict(SMALL, act_layer='gelu_tanh'), '',
    ),
    'SigLIP, both halves': (
        'SiglipModel', 'SiglipConfig',
        dict(
            vision_config=dict(SIZES),
            text_config=dict(
                WIDTH, intermediate_size=64, vocab_size=9, max_position_embeddings=77
            ),
        ),
        'vit_base_patch16_siglip_gap_224', dict(SMALL, act_layer='gelu_tanh'), 'vision_model',
    ),
    'SigLIP 2': (
        'Siglip2VisionModel', 'Siglip2VisionConfig',
        dict(WIDTH, intermediate_size=64, patch_size=8, num_patches=36),
        'vit_base_patch16_siglip_gap_224', dict(SMALL, act_layer='gelu_tanh'), '',
    ),
    'CLIP': (
        'CLIPVisionModelWithProjection', 'CLIPVisionConfig', dict(SIZES),
        'vit_base_patch16_clip_quickgelu_224', SMALL, 'vision_model',
    ),
    'CLIP, both halves': (
        'CLIPModel', 'CLIPConfig',
        dict(
            vision_config=dict(SIZES), projection_dim=32,
            text_config=dict(WIDTH, intermediate_size=64, vocab_size=9),
        ),
        'vit_base_patch16_clip_quickgelu_224', SMALL, 'vision_model',
    ),
    'ViT': ('ViTModel', 'ViTConfig', SIZES, 'vit_small_patch16_224', SMALL, ''),
    'ViT classifier': (
        'ViTForImageClassification', 'ViTConfig', SIZES, 'vit_small_patch16_224', SMALL, 'vit',
    ),
    'DeiT': (
        'DeiTModel', 'DeiTConfig', SIZES, 'deit_small_distilled_patch16_224', SMALL, '',
    ),
    'DeiT classifier': (
        'DeiTForImageClassificationWithTeacher', 'DeiTConfig', SIZES,
        'deit_small_distilled_patch16_224', SMALL, 'deit',
    ),
    'ViT-MAE': (
        'ViTMAEForPreTraining', 'ViTMAEConfig',
        dict(
            SIZES, mask_ratio=0.0, decoder_hidden_size=16, decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2, decoder_intermediate_size=16,
        ),
        'vit_small_patch16_224', SMALL, 'vit',
    ),
}  # fmt: skip


def tokens(source: nn.Module, part: str, image: Tensor) -> Tensor:
    model = source.get_submodule(part) if part else source
    name, options = type(model).__name__, dict(pixel_values=image)
    if name.startswith('ViTMAE'):
        options['noise'] = torch.arange(36.0)[None]
    if name.startswith('Siglip2'):
        # Patches as rows of (height, width, channel).
        rows = image.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).reshape(1, 36, -1)
        sizes = dict(pixel_attention_mask=torch.ones(1, 36), spatial_shapes=torch.tensor([[6, 6]]))
        options = dict(pixel_values=rows, **sizes)
    actual = model(**options).last_hidden_state
    # CLIP's norm comes behind the pooling there.
    return model.post_layernorm(actual) if name.startswith('CLIPVision') else actual


@pytest.mark.parametrize('form', ['folder', 'shards', 'state_dict'])
@pytest.mark.parametrize('name', CASES)
def test_outputs_are_transformers_own(name: str, form: str, tmp_path: Path) -> None:
    kind, config, options, timm_name, timm_options, part = CASES[name]
    source = built(kind, config, options)
    # Names of heads and of the other half, too.
    assert 'patch_embed.proj.weight' in timm_names(source.state_dict())
    if form == 'state_dict':
        weights, ending = source.state_dict(), 'position_embedding.weight'
        # Older versions save the numbers of the positions, too.
        numbers = [n.replace(ending, 'position_ids') for n in weights if n.endswith(ending)]
        checkpoint = tmp_path / 'model.pth'
        torch.save(weights | dict.fromkeys(numbers, torch.arange(36)), checkpoint)
    else:
        source.save_pretrained(
            tmp_path, **(dict(max_shard_size='20KB') if form == 'shards' else {})
        )
        assert (tmp_path / 'model.safetensors').exists() == (form == 'folder')
        checkpoint = tmp_path
    model = TimmViT(timm_name, model_options=timm_options, img_size=48, patch_size=8).eval()
    report = load_pretrained(model, checkpoint)
    assert not report.missing
    assert not report.mismatched
    image = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        x, hw = model.embed(image)
        for i in range(model.num_layers):
            x = model.run_block(i, x, hw)
        # fp32, two blocks.
        torch.testing.assert_close(model.norm(x), tokens(source, part, image), rtol=1e-4, atol=1e-4)


def test_what_a_model_lacks_is_said(tmp_path: Path) -> None:
    options = dict(model_options=SMALL, img_size=28)
    registers = TimmViT('vit_small_patch14_reg4_dinov2', **options)
    torch.save(registers.state_dict(), tmp_path / 'a.pth')
    model = TimmViT('vit_small_patch14_dinov2', **options)
    with pytest.raises(CheckpointMismatchError, match='reg_token'):
        load_pretrained(model, tmp_path / 'a.pth')
    options = dict(model_options=SMALL, img_size=32)
    biased = TimmViT('vit_small_patch16_dinov3_qkvb', **options)
    model = TimmViT('vit_small_patch16_dinov3', **options)
    for value in (0, 1):
        nn.init.constant_(biased.blocks[1].attn.v_bias, value)
        torch.save(biased.state_dict(), tmp_path / 'b.pth')
        if not value:
            assert not load_pretrained(model, tmp_path / 'b.pth').unexpected
    with pytest.raises(CheckpointMismatchError, match='v_bias'):
        load_pretrained(model, tmp_path / 'b.pth')


@pytest.mark.parametrize(
    ('name', 'head'), [('ViT classifier', 'classifier'), ('DeiT classifier', 'cls_classifier')]
)
def test_t5_inherits_a_classifier_of_transformers(name: str, head: str, tmp_path: Path) -> None:
    kind, config, options, *_, part = CASES[name]
    source = built(kind, config, options)
    source.save_pretrained(tmp_path)
    arch = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
    model, layer = T5(arch, img_size=48, patch_size=8), nn.ModuleDict(dict(fc=nn.Linear(32, 2)))
    load_inherited(model, checkpoint=tmp_path)
    load_inherited_head(layer, tmp_path)
    key = source.get_submodule(part).layers[1].attention.k_proj.weight
    assert torch.equal(model.blocks[1].mixer.qkv.weight[32:64], key)
    assert torch.equal(layer['fc'].weight, source.get_submodule(head).weight)


def test_a_name_of_the_hub_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, '_cached', lambda name, **_: tmp_path / name)
    folder = tmp_path / 'somebody' / 'vit'
    folder.mkdir(parents=True)
    save_file({'weight': torch.ones(2)}, folder / 'model.safetensors')
    for name in ('somebody/vit', 'hf-hub:somebody/vit', f'local-dir:{folder}', str(folder)):
        assert open_checkpoint(name).weights()['weight'].tolist() == [1, 1]
    (folder / 'model.safetensors').unlink()
    with pytest.raises(CheckpointMissingError):
        open_checkpoint(folder).weights()


@pytest.mark.parametrize('file', ['model.safetensors', 'pytorch_model.bin'])
def test_a_model_of_the_hub_is_downloaded_once(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def download(name: str, allow_patterns: list[str]) -> str:
        for there in (file, 'pytorch_model.bin'):
            if any(fnmatch(there, pattern) for pattern in allow_patterns):
                save = save_file if there.endswith('.safetensors') else torch.save
                save({'weight': torch.ones(2)}, tmp_path / there)
                loaded.append(there)
        return str(tmp_path)

    monkeypatch.setattr('huggingface_hub.snapshot_download', download)
    assert open_checkpoint('hf-hub:somebody/else').weights()['weight'].tolist() == [1, 1]
    assert {*loaded} == {file}


@pytest.mark.parametrize(
    'source',
    [
        'timm://vit_small_patch16_dinov3.lvd1689m',
        'timm://vit_small_patch16_dinov3.unheard',
        'timm://unheard',
        'hf-hub:nobody/unheard',
        'hf-hub:',
        './missing.pth',
        'run--1/missing.pth',
    ],
)
def test_names_of_hubs_without_a_network(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise OSError('no network\nand ten lines of advice')

    for name in ('snapshot_download', 'hf_hub_download'):
        monkeypatch.setattr(f'huggingface_hub.{name}', fails)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(source).weights()
    assert source.rpartition(':')[2].lstrip('/') in str(error.value)
