"""DiT⁵ as a DiT3 and as a linear DiT of diffusers: counts, formulas, one the other's weights."""

from pathlib import Path

import pytest
import torch

from mmvttt.convert.dit import PREFIX, dit_to_diffusers, dit_to_ours
from mmvttt.models.linearize import linearize

from .formulas import dit3, dit5_block, dit5_mixer

pytest.importorskip('diffusers')
from diffusers import DiTTransformer2DModel

from mmvttt.models.generation.dit3 import DIT5, DiT3
from mmvttt.models.linearize import saved

from .counts import counts

SOURCE = dict(
    num_attention_heads=2,
    attention_head_dim=6,
    num_layers=2,
    in_channels=3,
    out_channels=6,
    patch_size=2,
    sample_size=12,
    num_embeds_ada_norm=3,
    norm_eps=1e-6,
)


def linear_dit(**changes):
    """DiT⁵ made of diffusers' DiT."""
    model = DiTTransformer2DModel(**{**SOURCE, **changes})
    linearize(model, 'dit5')
    for block in model.transformer_blocks:
        # The published embedding of the time.
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return model


def dit5() -> DiT3:
    arch = dict(embed_dims=12, num_layers=2, num_heads=2)
    return DiT3(arch=arch, in_channels=3, num_classes=3, **DIT5).double()


# Parameters and those trained, in millions, and GFLOPs: of the authors' code.
@pytest.mark.parametrize(
    ('arch', 'whole', 'trained', 'gflops'),
    [
        ('small', 33.6638, 33.5655, 6.0604),
        ('base', 131.9132, 131.7166, 23.0145),
        ('xlarge', 680.5486, 680.2537, 119.1169),
    ],
)
def test_counts_are_those_of_the_authors_code(
    arch: str, whole: float, trained: float, gflops: float
) -> None:
    parameters, with_table, found = counts(arch, 2, **DIT5)
    assert (round(parameters, 4), round(with_table, 4)) == (trained, whole)
    # The counters see the window's products in different ways.
    assert found == pytest.approx(gflops, rel=1e-3)


def test_output_and_gradients_are_those_of_the_formulas() -> None:
    torch.manual_seed(0)
    model = dit5()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    latents = torch.randn(2, 3, 10, 14, dtype=torch.float64, requires_grad=True)
    times, labels = torch.tensor([7, 981]), torch.tensor([0, 3])
    direction = torch.randn(2, 6, 10, 14, dtype=torch.float64)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = torch.stack(
        [
            dit3(weights, x, t, y, depth=2, heads=2, patch=2, mixer=dit5_mixer)
            for x, t, y in zip(latents, times.tolist(), labels.tolist(), strict=True)
        ]
    )
    wanted = torch.autograd.grad((expected * direction).sum(), [latents, *weights.values()])
    out = model(latents, times, labels).sample
    grads = torch.autograd.grad((out * direction).sum(), [latents, *model.parameters()])
    # fp64, but for sines of time and place: fp32 in both, from rates that differ in the last bit.
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for name, grad, right in zip(['latents', *weights], grads, wanted, strict=True):
        assert right.any(), name
        difference = (grad - right).norm() / right.norm()
        assert difference < 1e-4, (name, difference)


def test_a_linear_dit_of_diffusers_is_the_same_model() -> None:
    """With the embedders of all blocks alike, and there and back by the converter."""
    torch.manual_seed(0)
    theirs = linear_dit()
    first, second = (block.norm1.emb for block in theirs.transformer_blocks)
    second.load_state_dict(first.state_dict())
    found = dit_to_ours(theirs.state_dict())
    assert found.complete
    assert found.name == 'DiT5'
    ours = dit5()
    ours.load_state_dict({n.removeprefix(PREFIX): w for n, w in found.weights.items()})
    args = torch.randn(2, 3, 12, 12).double(), torch.tensor([7, 981]), torch.tensor([0, 3])
    with torch.no_grad():
        out, expected = (model.eval()(*args).sample for model in (ours, theirs))
    # Times and positions are fp32 in both; the rest fp64, in another order of sums.
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    back = dit_to_diffusers(found.weights).weights
    assert set(back) == set(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(back[name], value), name


def test_blocks_of_diffusers_and_gradients_are_those_of_the_formulas() -> None:
    torch.manual_seed(0)
    model = linear_dit(num_layers=1)
    seen = {}
    block = model.transformer_blocks[0]
    block.register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out))
    times, labels = torch.tensor([7, 981]), torch.tensor([0, 3])
    model(torch.randn(2, 3, 12, 12).double(), timestep=times, class_labels=labels)
    names = [n for n, _ in model.named_parameters() if n.startswith('transformer_blocks')]
    parameters = dict(model.named_parameters())
    direction = torch.randn(seen['out'].shape).double()
    grads = torch.autograd.grad(
        (seen['out'] * direction).sum(), [seen['x'], *(parameters[n] for n in names)]
    )
    weights = {n: parameters[n].detach().clone().requires_grad_() for n in names}
    x = seen['x'].detach().requires_grad_()
    expected = torch.stack(
        [
            dit5_block(row, weights, 'transformer_blocks.0', t, y, 6, 6, heads=2)
            for row, t, y in zip(x, times.tolist(), labels.tolist(), strict=True)
        ]
    )
    wanted = torch.autograd.grad((expected * direction).sum(), [x, *weights.values()])
    # fp64, but for the sines of the time, in fp32 from rates that may differ in the last bit.
    torch.testing.assert_close(seen['out'], expected, rtol=1e-4, atol=1e-4)
    for name, grad, right in zip(['x', *names], grads, wanted, strict=True):
        if name.endswith('to_k.bias'):
            # A shift of all keys changes nothing in either branch: rounding alone.
            assert max(grad.abs().max(), right.abs().max()) < 1e-10
            continue
        assert right.any(), name
        difference = (grad - right).norm() / right.norm()
        assert difference < 1e-4, (name, difference)


def test_the_door_builds_it_with_the_published_embedding_of_the_time() -> None:
    models = pytest.importorskip('mmvttt.openmmlab.registry', exc_type=ImportError).MODELS
    source = dict(SOURCE, type='diffusers.DiTTransformer2DModel')
    config = dict(type='mmvttt.LinearTransformer', source=source, where='dit5')
    for options, shift in (({}, 1), (dict(time_shift=0), 0)):
        model = models.build(dict(config, **options))
        assert 'transformer_blocks.1.attn1.processor.qk_scale' in model.state_dict()
        for block in model.transformer_blocks:
            assert block.norm1.emb.time_proj.downscale_freq_shift == shift


def test_the_embedding_of_the_time_is_saved(tmp_path: Path) -> None:
    models = pytest.importorskip('mmvttt.openmmlab.registry', exc_type=ImportError).MODELS
    source = dict(SOURCE, type='diffusers.DiTTransformer2DModel')
    model = models.build(
        dict(type='mmvttt.LinearTransformer', source=source, where='dit5', time_shift=0)
    )
    model.save_pretrained(tmp_path)
    loaded = saved.DiTTransformer2DModel.from_pretrained(tmp_path)
    for block in loaded.transformer_blocks:
        assert block.norm1.emb.time_proj.downscale_freq_shift == 0
    assert loaded.config.time_shift == 0
