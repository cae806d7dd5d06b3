"""Files that hold half a network, shards that do not fit, names of wrappers, classes."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmvttt.checkpoints.authors import by_our_names
from mmvttt.checkpoints.download import _request, named_digest, without_secrets
from mmvttt.checkpoints.families import timm_names
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.read import named_tensors, open_checkpoint
from mmvttt.errors import CheckpointError, CheckpointMismatchError, CheckpointMissingError
from mmvttt.models.backbones import TimmViT

SMALL = dict(embed_dim=32, depth=2, num_heads=2)
DINOV2 = dict(model='vit_small_patch14_reg4_dinov2', model_options=SMALL, img_size=28)


@pytest.mark.parametrize('lost', ['patch_embed', 'mlp', 'gated', 'attn.qkv', 'gamma', 'reg_token'])
def test_half_a_network_is_an_error(lost: str, tmp_path: Path) -> None:
    weights = TimmViT(**DINOV2).state_dict()
    if lost == 'gated':
        gated = TimmViT('vit_giant_patch14_reg4_dinov2', model_options=SMALL, img_size=28)
        weights = gated.state_dict()
    model = TimmViT(**DINOV2)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    torch.save({n: v for n, v in weights.items() if lost not in n}, tmp_path / 'a.pth')
    with pytest.raises(CheckpointMismatchError):
        load_pretrained(model, tmp_path / 'a.pth')
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def _blocks(wrapper: str) -> Callable[[str], str]:
    return lambda name: name.replace('blocks.1.', f'blocks.1.{wrapper}.')


@pytest.mark.parametrize(
    'rename',
    [
        _blocks('_orig_mod'),
        _blocks('_fsdp_wrapped_module._checkpoint_wrapped_module'),
        lambda name: f'_orig_mod.module.{name}',
        lambda name: f'module._orig_mod.{name}',
        lambda name: f'module.{name}',
    ],
)
def test_names_of_wrappers_are_dropped_anywhere(rename: Callable) -> None:
    weights = TimmViT(**DINOV2).state_dict()
    content = {rename(n): v for n, v in weights.items()}
    assert named_tensors(content, 'a.pth').keys() == weights.keys()


@pytest.mark.parametrize(
    ('content', 'said'),
    [
        (dict(model={}, model_ema={}), 'model_ema'),
        (dict(state_dict={}, ema_state_dict={}), 'EMAHook'),
        (dict(model={}), None),
    ],
)
def test_which_of_two_kinds_of_weights_is_said(content, said, caplog) -> None:
    caplog.set_level('INFO')
    named_tensors({key: {'w': torch.ones(1)} for key in content}, 'a.pth')
    assert said in caplog.text if said else not caplog.text


def _shards(folder: Path, index: dict[str, str], **shards: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, weights in shards.items():
        own = {key: value.clone() for key, value in weights.items()}
        save_file(own, folder / f'{name}.safetensors')
    path = folder / 'model.safetensors.index.json'
    path.write_text(json.dumps(dict(weight_map={k: f'{v}.safetensors' for k, v in index.items()})))
    return folder


def test_the_index_decides_on_shards(tmp_path: Path) -> None:
    one, two = torch.ones(1), torch.zeros(1)
    index = dict(a='x', b='y')
    whole = _shards(tmp_path / 'good', index, x=dict(a=one), y=dict(b=two))
    assert open_checkpoint(whole).weights() == dict(a=one, b=two)
    for name, shards in dict(
        twice=dict(x=dict(a=one), y=dict(a=two, b=two)),
        none=dict(x=dict(a=one), y=dict(c=two)),
        other=dict(x=dict(b=one), y=dict(a=two)),
    ).items():
        with pytest.raises(CheckpointError):
            open_checkpoint(_shards(tmp_path / name, index, **shards)).weights()
    # One shard has an index, too.
    with pytest.raises(CheckpointError):
        open_checkpoint(_shards(tmp_path / 'single', dict(a='x', b='x'), x=dict(a=one))).weights()
    # A file that is there, but not in the folder of the index.
    outside = _shards(tmp_path / 'outside', dict(a='x', b='../good/y'), x=dict(a=one))
    with pytest.raises(CheckpointMissingError):
        open_checkpoint(outside).weights()
    torch.save([1], tmp_path / 'single' / 'list.bin')
    index_file = tmp_path / 'single/model.safetensors.index.json'
    index_file.write_text('{"weight_map": {"a": "list.bin"}}')
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / 'single').weights()


def test_a_pipe_beside_the_weights_is_no_config(tmp_path: Path) -> None:
    save_file({'weight': torch.ones(2, 2), 'bias': torch.ones(2)}, tmp_path / 'model.safetensors')
    for name in ('config.json', 'preprocessor_config.json', 'open_clip_config.json'):
        os.mkfifo(tmp_path / name)
    model = torch.nn.Linear(2, 2)
    assert load_pretrained(model, tmp_path).preparation is None
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_two_names_for_one_tensor() -> None:
    block = {f'encoder.layer.0.{n}.weight': torch.ones(2) for n in ('layernorm_before', 'mlp.fc1')}
    embedding = {'embeddings.patch_embeddings.projection.weight': torch.ones(2, 3, 2, 2)}
    theirs = block | embedding
    assert len(timm_names(theirs)) == 3
    with pytest.raises(CheckpointError):
        timm_names(theirs | {'encoder.layer.0.intermediate.dense.weight': torch.zeros(2)})
    public = {'backbone.blocks.0.attn.w1': torch.ones(1, 1, 2, 2)}
    with pytest.raises(CheckpointError):
        by_our_names(public | {'backbone.blocks.0.mixer.w1': torch.zeros(1, 2, 2)})
    with pytest.raises(CheckpointError):
        named_tensors({'a.w': torch.ones(1), '_orig_mod.a.w': torch.ones(1)}, 'a.pth')


def test_digests_in_names() -> None:
    names = ('run-12345678', 'a-20240101', 'resnet50-0676ba61', 'a-1234567890abcdef', 'epoch-3')
    digests = [named_digest(f'{name}.pth') for name in names]
    assert digests == ['', '', '0676ba61', '1234567890abcdef', '']


def test_what_a_log_shows_of_a_url() -> None:
    url = 'https://me:secret@host/a.pth?token=secret'
    assert without_secrets(url) == 'https://host/a.pth?…'
    assert _request(url).full_url == 'https://host/a.pth?token=secret'
    assert _request(url).unredirected_hdrs['Authorization'].startswith('Basic ')
    assert without_secrets('a?b.pth') == 'a?b.pth'
    with pytest.raises(CheckpointMissingError) as error:
        open_checkpoint(f'ftp{url[5:]}').weights()
    assert 'secret' not in str(error.value)
