"""DiT³: counts of the papers, its start, its formulas, and its life in diffusers."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip('diffusers')
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
)

from mmvttt.models.generation.dit3 import DiT3, position_table

from .counts import counts
from .formulas import dit3, position

SMALL = dict(embed_dims=24, num_layers=2, num_heads=2)
SOFTMAX = dict(type='mmvttt.TTTMixer', inner=dict(type='SoftmaxAttention'))
# Parameters in millions with the fixed position table, which is none here, and trained ones; GFLOPs
# without the inner gradient of the 3×3: of the authors' code. Then the paper's Tab. 10.
COUNTS = {
    ('small', 8): (34.9729, 34.9668, 0.4036, 35, 0.40),
    ('small', 4): (34.7698, 34.7452, 1.5667, 35, 1.57),
    ('small', 2): (34.7881, 34.6898, 6.2191, 35, 6.23),
    ('base', 8): (134.5219, 134.5096, 1.5086, 135, 1.51),
    ('base', 4): (134.1160, 134.0668, 5.8729, 134, 5.88),
    ('base', 2): (134.1527, 133.9561, 23.3301, 134, 23.35),
    ('large', 2): (467.8042, 467.5420, 81.5631, None, None),
    ('xlarge', 2): (689.4110, 689.1161, 120.4180, None, None),
}
DIT_COUNTS = {
    ('small', 8): (33.1482, 0.3580),
    ('small', 4): (32.9450, 1.4126),
    ('small', 2): (32.9634, 6.0557),
    ('base', 2): (130.5124, 23.0051),
    ('large', 2): (458.1028, 80.6976),
    ('xlarge', 2): (675.1296, 118.6214),
}


@pytest.mark.parametrize(('arch', 'patch'), COUNTS)
def test_counts_are_those_of_the_authors_code_and_the_paper(arch: str, patch: int) -> None:
    whole, trained, gflops, paper_params, paper_gflops = COUNTS[arch, patch]
    parameters, with_table, found = counts(arch, patch)
    assert (round(parameters, 4), round(with_table, 4)) == (trained, whole)
    assert round(found, 4) == gflops
    if paper_params:
        assert round(whole) == paper_params
        # Its counter adds up to .3 % for norms (fvcore).
        assert found == pytest.approx(paper_gflops, rel=4e-3, abs=6e-3)


@pytest.mark.parametrize(('arch', 'patch'), DIT_COUNTS)
def test_counts_of_dit(arch: str, patch: int) -> None:
    whole, gflops = DIT_COUNTS[arch, patch]
    _, with_table, found = counts(arch, patch, mixer=SOFTMAX, cpe=False)
    assert (round(with_table, 4), round(found, 4)) == (whole, gflops)


def spread(model: nn.Module) -> None:
    """Weights of the size of trained ones, so that everything has an effect."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)


def test_output_is_zero_at_the_start() -> None:
    torch.manual_seed(0)
    model = DiT3(arch=SMALL, num_classes=3)
    out = model(torch.randn(2, 4, 6, 10), torch.tensor([0, 999]), torch.tensor([1, 3])).sample
    assert out.shape == (2, 8, 6, 10)
    assert not out.any()


def test_start_is_dits() -> None:
    torch.manual_seed(0)
    model = DiT3(arch=dict(SMALL, embed_dims=96), num_classes=1000)
    for name, parameter in model.named_parameters():
        zero = name.endswith('bias') and 'cpe' not in name
        zero |= name.startswith('final_') or '.modulation.' in name
        assert zero != bool(parameter.any()), name
    for linear in (model.blocks[0].mixer.qkv, model.blocks[0].mlp.net[2], model.patch_embed):
        fan_in, fan_out = linear.weight[0].numel(), len(linear.weight)
        bound = (6 / (fan_in + fan_out)) ** 0.5
        # The largest of thousands of uniform numbers comes close to the bound.
        assert 0.95 * bound < linear.weight.abs().max() <= bound
    for module in (model.time_embed.linear_1, model.time_embed.linear_2, model.label_embed):
        # Thousands of numbers: their deviation is known to a few percent.
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_output_and_gradients_are_those_of_the_formulas() -> None:
    torch.manual_seed(0)
    model = DiT3(arch=SMALL, patch_size=2, in_channels=3, num_classes=3).double()
    spread(model)
    latents = torch.randn(2, 3, 6, 10, dtype=torch.float64)
    latents.requires_grad_()
    times, labels = torch.tensor([7, 981]), torch.tensor([0, 3])
    direction = torch.randn(2, 6, 6, 10, dtype=torch.float64)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = torch.stack(
        [
            dit3(weights, x, t, y, depth=2, heads=2, patch=2)
            for x, t, y in zip(latents, times.tolist(), labels.tolist(), strict=True)
        ]
    )
    expected_grads = torch.autograd.grad(
        (expected * direction).sum(), [latents, *weights.values()], materialize_grads=True
    )
    out = model(latents, times, labels).sample
    grads = torch.autograd.grad((out * direction).sum(), [latents, *model.parameters()])
    # fp64, but for the sines and cosines of time and place: fp32 in both, from rates that may
    # differ in the last bit, 6e-8, times 981.
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for name, grad, wanted in zip(['latents', *weights], grads, expected_grads, strict=True):
        assert wanted.any(), name
        difference = (grad - wanted).norm() / wanted.norm()
        assert difference < 1e-4, (name, difference)


def test_positions() -> None:
    # fp32 angles up to 9.
    torch.testing.assert_close(
        position_table((4, 9), 24).double(), position(4, 9, 24), rtol=0, atol=2e-6
    )


def test_saves_and_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DiT3(arch=SMALL, num_classes=3, null_class=False, in_channels=1)
    spread(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / 'config.json').read_text())['arch'] == SMALL
    again = DiT3.from_pretrained(tmp_path)
    ours = {k: v for k, v in model.config.items() if not k.startswith('_')}
    assert ours == {k: again.config[k] for k in ours}
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_checkpointing_changes_nothing() -> None:
    torch.manual_seed(0)
    model = DiT3(arch=SMALL, num_classes=3)
    spread(model)
    latents, one = torch.randn(2, 4, 6, 10), torch.tensor([1, 2])
    found = []
    for _ in range(2):
        model.zero_grad()
        model(latents, one, one).sample.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.enable_gradient_checkpointing()
    # The same operations twice.
    for (name, _), plain, again in zip(model.named_parameters(), *found, strict=True):
        assert torch.equal(plain, again), name


def test_diffusers_pipeline_takes_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    model = DiT3(arch=SMALL, sample_size=8)
    pipeline = DiTPipeline(model, vae, DDIMScheduler())
    pipeline.save_pretrained(tmp_path)
    images = []
    for same in (pipeline, DiTPipeline.from_pretrained(tmp_path)):
        same.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        options = dict(generator=generator, num_inference_steps=2, output_type='np')
        images.append(same([1, 7], **options).images)
    assert images[0].shape == (2, 8, 8, 3)
    assert (images[0] == images[1]).all()


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(arch='huge'), "no arch 'huge'"),
        (dict(patch_size=0), 'patch_size=0'),
        (dict(mixer='ViT3Mixr'), "mixer='ViT3Mixr'"),
    ],
)
def test_bad_options(options: dict, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        DiT3(**options)


def test_bad_latents() -> None:
    model = DiT3(arch=SMALL, num_classes=3)
    with pytest.raises(ValueError, match=r'multiples of 2'):
        model(torch.zeros(1, 4, 5, 4), torch.tensor(0), torch.tensor([0]))
