"""DiT³, DiT⁵ and DiT by the authors' names, and DiT and DiT⁵ by diffusers'."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmvttt.checkpoints.authors import by_our_names
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.errors import CheckpointError

from ..models import published
from ..models.building import shaken

pytest.importorskip('diffusers')
from diffusers import DiTTransformer2DModel

from mmvttt.models.generation.dit3 import DIT, DIT5, DiT3, position_table
from mmvttt.models.linearize import linearize

D, DEPTH, HEADS, CLASSES = 24, 2, 2, 5
ARCH = dict(embed_dims=D, num_layers=DEPTH, num_heads=HEADS)
OPTIONS = {'DiT3': {}, 'DiT5': DIT5, 'DiT': DIT}


def authors(kind: str) -> dict[str, Tensor]:
    weights = published.random_weights(published.dit_shapes(kind, D, DEPTH, HEADS, 2, CLASSES))
    return {'pos_embed': position_table((4, 4), D)[None], **weights}


def built(kind: str) -> DiT3:
    return DiT3(arch=ARCH, num_classes=CLASSES, **OPTIONS[kind])


@pytest.mark.parametrize('kind', OPTIONS)
def test_a_file_of_the_authors_and_back(kind: str, tmp_path: Path) -> None:
    """The averaged weights; then their model gets ours."""
    weights = authors(kind)
    raw = {n: v if n == 'pos_embed' else v + 1 for n, v in weights.items()}
    torch.save(dict(model=raw, ema=weights, opt={}), tmp_path / 'public.pt')
    model = built(kind)
    report = load_pretrained(model, tmp_path / 'public.pt')
    assert report.missing == report.unexpected == report.mismatched == []
    if kind == 'DiT5':
        theirs = weights['blocks.1.attn.qk_scale_ttt']
        # q first, then k.
        assert torch.equal(model.blocks[1].mixer.qk_scale[1], theirs[0, 0, :, 1])
    for name, value in by_our_names(raw).items():
        value.copy_(model.state_dict()[name.removeprefix('transformer.')])
    assert all(torch.equal(raw[name], value) for name, value in weights.items())


def of_diffusers(kind: str) -> DiTTransformer2DModel:
    """A DiT, or one to which `linearize` has given DiT⁵'s mixers, as the published models are."""
    model = DiTTransformer2DModel(
        HEADS, D // HEADS, 4, 8, DEPTH, sample_size=12, num_embeds_ada_norm=CLASSES, norm_eps=1e-6
    )
    if kind == 'DiT5':
        linearize(model, 'dit5')
    shaken(model)
    for block in model.transformer_blocks:
        block.norm1.emb.load_state_dict(model.transformer_blocks[0].norm1.emb.state_dict())
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    return model


@pytest.mark.parametrize('kind', ['DiT', 'DiT5'])
def test_a_dit_of_diffusers_computes_the_same(kind: str, tmp_path: Path) -> None:
    theirs = of_diffusers(kind)
    save_file(theirs.state_dict(), tmp_path / 'theirs.safetensors')
    model = built(kind)
    report = load_pretrained(nn.ModuleDict({'transformer': model}), tmp_path / 'theirs.safetensors')
    assert report.missing == report.unexpected == report.mismatched == []
    latents = torch.randn(3, 4, 12, 12, dtype=torch.float64, requires_grad=True)
    args = latents, torch.tensor([0, 437, 999]), torch.tensor([0, 4, 5])
    outs = [net.double().eval()(*args).sample for net in (model, theirs)]
    grads = [torch.autograd.grad(out.square().sum(), latents)[0] for out in outs]
    # Times and positions are fp32 in both; the rest fp64, in another order of sums.
    for pair in (outs, grads):
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-9)


def test_load_from_takes_a_dit_of_diffusers() -> None:
    pytest.importorskip('mmengine')
    from mmengine.runner.checkpoint import load_state_dict

    from mmvttt.openmmlab.models.diffusion_model import DiffusionModel

    theirs = of_diffusers('DiT')
    model = DiffusionModel(
        dict(type='mmvttt.DiT3', arch=ARCH, num_classes=CLASSES, **DIT),
        dict(type='diffusers.DDPMScheduler', variance_type='learned_range', clip_sample=False),
    )
    load_state_dict(model, theirs.state_dict(), strict=True)
    weight = theirs.transformer_blocks[1].attn1.to_k.weight
    assert torch.equal(model.transformer.blocks[1].mixer.qkv.weight[D : 2 * D], weight)


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    weights, model = authors('DiT3'), built('DiT3')
    wrong: Tensor = weights['pos_embed'] + 0.1
    for table in (wrong, torch.ones(()), torch.ones(3, 3)):
        with pytest.raises(CheckpointError):
            by_our_names(weights | {'pos_embed': table})
    # With embedders of each block's own, and of a damaged file.
    apart = DiTTransformer2DModel(HEADS, D // HEADS, 4, 8, DEPTH).state_dict()
    with pytest.raises(CheckpointError):
        model.adapt_weights(apart)
    for name, value in weights.items():
        if 'blocks.1' in name:
            torch.save(weights | {name: value.flatten()[0]}, tmp_path / 'damaged.pth')
            assert len(load_pretrained(model, tmp_path / 'damaged.pth').mismatched) == 1, name
