"""Files of those who publish a ViT without transformers, and every form of a file, load plainly.

Files are made up: the names of those who write them, and tensors whose values count on from name to
name. Names are listed in the order of timm's model, so what is swapped or transposed shows. Files
of transformers are in test_families.py.
"""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.models.backbones import TimmViT

from .test_families import CASES

Weights = dict[str, Tensor]

# A name that ends in a dot is of a weight and a bias; `{a,b}` are two names. The first are of the
# text's half of SigLIP, with the names that tell a family.
_TEXT = """
embeddings.token_embedding.weight 9 32
encoder.layers.0.self_attn.q_proj. 32 32
final_layer_norm. 32
"""
# The names of timm and of torch.hub.
_TIMM = """
patch_embed.proj. 32 3 8 8
cls_token 1 1 32
pos_embed 1 37 32
blocks.{0,1}.norm1. 32
blocks.{0,1}.attn.qkv. 96 32
blocks.{0,1}.attn.proj. 32 32
blocks.{0,1}.norm2. 32
blocks.{0,1}.mlp.fc1. 64 32
blocks.{0,1}.mlp.fc2. 32 64
norm. 32
"""
_META_DINOV2 = re.sub(r'(.*)\.norm2.*', r'\1.ls1.gamma 32\n\g<0>', _TIMM)
_META_DINOV2 = re.sub(r'(.*)\.mlp\.fc2.*', r'\g<0>\n\1.ls2.gamma 32', _META_DINOV2)
_META_DINOV2 += 'mask_token 1 32'
_META_DINOV3 = _TIMM.replace(
    'pos_embed 1 37 32',
    'storage_tokens 1 4 32\nmask_token 1 32\nrope_embed.periods 4\nblocks.{0,1}.ls{1,2}.gamma 32',
)
_META_DINOV3 = re.sub(r'(.*\.qkv\.).*', r'\g<0>\n\1bias_mask 96', _META_DINOV3)
_OPEN_CLIP = """
visual.conv1.weight 32 3 8 8
visual.class_embedding 32
visual.positional_embedding 37 32
visual.ln_pre. 32
visual.transformer.resblocks.{0,1}.ln_1. 32
visual.transformer.resblocks.{0,1}.attn.in_proj_{weight,bias} 96 32
visual.transformer.resblocks.{0,1}.attn.out_proj. 32 32
visual.transformer.resblocks.{0,1}.ln_2. 32
visual.transformer.resblocks.{0,1}.mlp.c_fc. 64 32
visual.transformer.resblocks.{0,1}.mlp.c_proj. 32 64
visual.ln_post. 32
visual.proj 32 32
positional_embedding 77 32
token_embedding.weight 9 32
transformer.resblocks.0.ln_1. 32
ln_final. 32
text_projection 32 32
logit_scale
"""


def under(prefix: str, names: str) -> str:
    return '\n'.join(f'{prefix}{line}' for line in names.split('\n') if line)


def made_up(names: str, start: int = 0) -> Weights:
    """The tensors of a listing; every number is there once."""
    actual: Weights = {}
    for line in filter(None, names.split('\n')):
        pattern, *shape = line.split()
        lists = [part.split(',') for part in re.findall(r'{(.*?)}', pattern)]
        for words in itertools.product(*lists):
            name = re.sub(r'{.*?}', '{}', pattern).format(*words)
            for whole in (f'{name}weight', f'{name}bias') if name.endswith('.') else (name,):
                sides = list(map(int, shape[:1] if whole.endswith('bias') else shape))
                count = torch.Size(sides).numel()
                actual[whole] = torch.arange(start, start + count).float().view(sides)
                start += count
    return actual


FILE, FOLDER, BIN, CLIP = (
    *('weights.pth', 'model.safetensors', 'pytorch_model.bin', 'open_clip_model.safetensors'),
)
SHARDS, BIN_SHARDS = 'model-{}.safetensors', 'pytorch_model-{}.bin'


def written(folder: Path, weights: Weights, form: str) -> Path:
    """A file, or the folder of files of known names; `{}` is the number of a shard."""
    where = {name: form.format(i % 2) for i, name in enumerate(weights)}
    for file in {*where.values()}:
        save = save_file if form.endswith('.safetensors') else torch.save
        save({n: w for n, w in weights.items() if where[n] == file}, folder / file)
    if '{}' in form:
        index = folder / f'{form.replace("-{}", "")}.index.json'
        index.write_text(json.dumps({'weight_map': where}))
    (folder / 'config.json').write_text('{"model_type": "vit"}')
    return folder / FILE if form == FILE else folder


# Kind → names, the form of the file, and the model in test_families.py.
KINDS: dict[str, tuple[str, str, str]] = {
    'timm, safetensors': (f'{_TIMM}\nhead. 2 32', FOLDER, 'ViT'),
    'timm, shards': (_TIMM, SHARDS, 'ViT'),
    'timm, pytorch_model.bin': (_TIMM, BIN, 'ViT'),
    'timm, shards of .bin': (_TIMM, BIN_SHARDS, 'ViT'),
    'DINOv2, torch.hub': (_META_DINOV2, FILE, 'DINOv2'),
    'DINOv2 with registers, torch.hub': (
        f'{_META_DINOV2}\nregister_tokens 1 4 32', FILE, 'DINOv2 with registers',
    ),
    'DINOv2, chunked blocks': (_META_DINOV2.replace('blocks.', 'blocks.0.'), FILE, 'DINOv2'),
    'DINOv3, torch.hub': (_META_DINOV3, FILE, 'DINOv3'),
    'open_clip, CLIP': (_OPEN_CLIP, CLIP, 'CLIP'),
    'open_clip, SigLIP': (
        under('visual.trunk.', re.sub('cls_token.*\n', '', _TIMM).replace('1 37', '1 36'))
        + '\n' + under('text.', _TEXT),
        CLIP, 'SigLIP',
    ),
}  # fmt: skip


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_loads(kind: str, tmp_path: Path) -> None:
    names, form, case = KINDS[kind]
    *_, timm_name, options, _ = CASES[case]
    weights = made_up(names)
    model = TimmViT(timm_name, model_options=options, img_size=48, patch_size=8)
    report = load_pretrained(model, written(tmp_path, weights, form))
    assert not report.missing
    assert not report.mismatched
    actual = model.state_dict()
    if 'registers' in kind:
        # The class token's row is added to it.
        token = next(name for name in weights if name.endswith('cls_token'))
        position = next(n for n in weights if n.endswith(('position_embeddings', 'pos_embed')))
        assert torch.equal(actual['cls_token'], weights[token] + weights[position][:, :1])
        actual['cls_token'] = weights[token]
    known = torch.cat([w.flatten() for w in weights.values()])
    for name, value in actual.items():
        assert torch.isin(value, known).all(), name
        assert (value.flatten().diff() > 0).all(), name
    # timm has γ and these biases before all else of a block.
    for block in ('blocks.0.', 'blocks.1.'):
        names = [n for n in actual if n.startswith(block) and '_bias' not in n]
        assert names == sorted(names, key=lambda n: actual[n].min())
