"""Checkpoints of DiT³, DiT⁵ and DiT, by the authors' names and by diffusers', to ours and back."""

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmvttt.checkpoints.read import read_weights
from mmvttt.convert import convert_checkpoint
from mmvttt.errors import CheckpointError

pytest.importorskip('diffusers')
from diffusers import DiTTransformer2DModel

from mmvttt.models.generation.dit3 import DIT, DIT5, DiT3, position_table
from mmvttt.models.linearize import linearize

from .small import spread

D, DEPTH, HEADS, CLASSES = 24, 2, 2, 5
ARCH = dict(embed_dims=D, num_layers=DEPTH, num_heads=HEADS)
OPTIONS = {'DiT3': {}, 'DiT5': DIT5, 'DiT': DIT}


def authors(kind: str) -> dict[str, Tensor]:
    """A state dict with the authors' names and shapes, as they are published."""
    head = D // HEADS
    extra = head if kind == 'DiT3' else 0
    # With a weight of this shape and a bias.
    layers = {
        'x_embedder.proj': (D, 4, 2, 2),
        't_embedder.mlp.0': (D, 256),
        't_embedder.mlp.2': (D, D),
        'final_layer.linear': (32, D),
        'final_layer.adaLN_modulation.1': (2 * D, D),
    }
    shapes = {'y_embedder.embedding_table.weight': (CLASSES + 1, D)}
    for i in range(DEPTH):
        block = f'blocks.{i}'
        layers |= {
            f'{block}.attn.qkv': (3 * (D + extra), D),
            f'{block}.attn.proj': (D, D + extra),
            f'{block}.mlp.fc1': (4 * D, D),
            f'{block}.mlp.fc2': (D, 4 * D),
            f'{block}.adaLN_modulation.1': (6 * D, D),
        }
        convs = {'DiT3': ['cpe'], 'DiT5': ['attn.q_conv2d', 'attn.k_conv2d'], 'DiT': []}[kind]
        layers |= {f'{block}.{conv}': (D, 1, 3, 3) for conv in convs}
        if kind != 'DiT':
            shapes |= {f'{block}.attn.w{n}': (1, HEADS, head, head) for n in (1, 2)}
        if kind == 'DiT3':
            shapes[f'{block}.attn.w3'] = (head, 1, 3, 3)
        elif kind == 'DiT5':
            shapes |= {f'{block}.attn.qk_{n}_ttt': (1, 1, D, 2) for n in ('scale', 'offset')}
    shapes |= {f'{name}.weight': shape for name, shape in layers.items()}
    shapes |= {f'{name}.bias': shape[:1] for name, shape in layers.items()}
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    return {'pos_embed': position_table((4, 4), D)[None], **weights}


def built(kind: str) -> DiT3:
    return DiT3(arch=ARCH, num_classes=CLASSES, **OPTIONS[kind])


def ours(path: Path) -> dict[str, Tensor]:
    return {n.removeprefix('transformer.'): w for n, w in read_weights(path).items()}


@pytest.mark.parametrize('kind', OPTIONS)
def test_authors_checkpoint_and_back(kind: str, tmp_path: Path) -> None:
    """A file of a training script: the averaged weights, strictly; 8 channels for 32 latents."""
    weights = authors(kind)
    plain = {name: value + 1 for name, value in weights.items()}
    content = dict(model=plain, ema=weights, opt={}, args=argparse.Namespace(lr=1e-4))
    torch.save(content, tmp_path / 'public.pt')
    result = convert_checkpoint(tmp_path / 'public.pt', tmp_path / 'ours.pth', ema=True)
    assert result.complete
    assert set(result.matched) | set(result.dropped) == set(weights)
    model = built(kind)
    model.load_state_dict(ours(tmp_path / 'ours.pth'))
    if kind == 'DiT5':
        theirs = weights['blocks.1.attn.qk_scale_ttt']
        # q first, then k.
        assert torch.equal(model.blocks[1].mixer.qk_scale[1], theirs[0, 0, :, 1])
    meta = torch.load(tmp_path / 'ours.pth', weights_only=True)['meta']
    assert (meta['averaged'], meta['sample_size']) == (True, 8)
    back = convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'back.pt', to='public')
    assert back.complete
    again = torch.load(tmp_path / 'back.pt', weights_only=True)['model']
    assert set(again) == set(weights)
    # The positions too: the file says how large its latents are.
    for name, value in weights.items():
        assert torch.equal(again[name], value), name
    assert ('window of 5' in back.caution) == (kind == 'DiT5')


def test_size_of_the_positions(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By option, by the config of a training; a guess is said."""
    weights = {f'transformer.{n}': w for n, w in built('DiT').state_dict().items()}
    cfg = 'model = dict(transformer=dict(patch_size=2, sample_size=64))'
    torch.save(dict(state_dict=weights, meta=dict(cfg=cfg)), tmp_path / 'trained.pth')
    torch.save(dict(state_dict=weights), tmp_path / 'bare.pth')
    for name, options, side in (
        ('trained', {}, 32),
        ('trained', dict(sample_size=20), 10),
        ('bare', {}, 16),
    ):
        target = tmp_path / 'public.pt'
        result = convert_checkpoint(tmp_path / f'{name}.pth', target, to='public', **options)
        written = torch.load(target, weights_only=True)['model']['pos_embed']
        assert torch.equal(written, position_table((side, side), D)[None])
        assert ('does not say how large' in result.caution) == (name == 'bare')
    with pytest.raises(CheckpointError, match='sample_size=21: the side'):
        convert_checkpoint(tmp_path / 'bare.pth', target, to='public', sample_size=21)
    with pytest.raises(CheckpointError, match='is for public files'):
        convert_checkpoint(target, tmp_path / 'ours.pth', sample_size=32)


@pytest.mark.parametrize('kind', ['DiT', 'DiT5'])
def test_diffusers_dit_is_the_same_model(kind: str, tmp_path: Path) -> None:
    """DiT, or diffusers' DiT made linear, with the embedders of all blocks alike."""
    torch.manual_seed(0)
    options = dict(sample_size=12, num_embeds_ada_norm=CLASSES, norm_eps=1e-6)
    theirs = DiTTransformer2DModel(HEADS, D // HEADS, 4, 8, DEPTH, **options)
    if kind == 'DiT5':
        linearize(theirs, 'dit5')
    theirs = spread(theirs.eval(), 0.2)
    for block in theirs.transformer_blocks:
        block.norm1.emb.load_state_dict(theirs.transformer_blocks[0].norm1.emb.state_dict())
        # With norm_eps, what makes it the published model.
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    save_file(theirs.state_dict(), tmp_path / 'theirs.safetensors')
    result = convert_checkpoint(tmp_path / 'theirs.safetensors', tmp_path / 'ours.pth')
    assert result.complete
    assert result.name == kind
    model = built(kind)
    model.load_state_dict(ours(tmp_path / 'ours.pth'))
    latents = torch.randn(3, 4, 12, 12, dtype=torch.float64, requires_grad=True)
    args = latents, torch.tensor([0, 437, 999]), torch.tensor([0, 4, 5])
    outs = [net.double().eval()(*args).sample for net in (model, theirs)]
    grads = [torch.autograd.grad(out.square().sum(), latents)[0] for out in outs]
    # Times and positions are fp32 in both; the rest fp64, in another order of sums.
    for pair in (outs, grads):
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-9)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    weights = authors('DiT3')
    source, target, name = tmp_path / 'public.pt', tmp_path / 'ours.pth', 'blocks.1.attn.w2'
    for state, missing, left_over in (
        ({n: w for n, w in weights.items() if n != name}, [name], []),
        ({**weights, f'{name}b': torch.zeros(1)}, [], [f'{name}b']),
    ):
        torch.save(state, source)
        result = convert_checkpoint(source, target)
        assert (result.missing, result.left_over) == (missing, left_over)
    for state, words in (
        ({**weights, 'pos_embed': weights['pos_embed'] + 0.1}, 'fixed table'),
        # With embedders in each block.
        (DiTTransformer2DModel(HEADS, D // HEADS, 4, 8, DEPTH).state_dict(), 'blocks before'),
    ):
        torch.save(state, source)
        with pytest.raises(CheckpointError, match=words):
            convert_checkpoint(source, target)
    assert not target.exists()
