"""Sampling: diffusers' own loop, data whose answer is known, guidance."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmvttt.models.generation.sampling import (
    SCHEDULERS,
    image_generator,
    sample,
    sampling_scheduler,
)

from ..models.building import shaken
from .small import DDPM, FLOW, flow_model, model

diffusers = pytest.importorskip('diffusers')
MODELS = pytest.importorskip('mmvttt.openmmlab.registry', exc_type=ImportError).MODELS

# Pixels of a data set that is a Gaussian: what every scheduler must draw from.
MEAN, DEVIATION = 0.7, 0.5


def build(config: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    return shaken(MODELS.build(config))


def labels(*numbers: int) -> dict[str, Tensor]:
    return dict(class_labels=torch.tensor(numbers))


def generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [image_generator(seed, i) for i in range(count)]


def test_equals_the_loop_of_diffusers() -> None:
    """DDPM with a learned variance, step by step as diffusers' documents write it."""
    network, told = build(model()), labels(3, 7)
    scheduler = sampling_scheduler(network.scheduler, 'ddpm')
    drawn = sample(
        lambda x, t: network.denoise(x, t, told), scheduler, (1, 8, 8), 10, generators(2, 5)
    )
    theirs_generators = generators(2, 5)
    x = torch.stack([torch.randn(1, 8, 8, generator=g) for g in theirs_generators])
    theirs = type(network.scheduler).from_config(network.scheduler.config)
    theirs.set_timesteps(10)
    with torch.no_grad():
        for t in theirs.timesteps:
            output = network.transformer(x, timestep=t.expand(2), **told).sample
            x = theirs.step(output, t, x, generator=theirs_generators).prev_sample
    assert drawn.std() > 0.1
    assert torch.equal(drawn, x)


def test_equals_diffusers_pipeline_with_guidance(tmp_path: Path) -> None:
    """A saved pipeline: all channels guided, DDIM, 1000 classes, as diffusers' allows."""
    config = model(transformer=dict(in_channels=4, sample_size=8, num_classes=1000, patch_size=2))
    network = build(config)
    scheduler = sampling_scheduler(network.scheduler, 'ddim')
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    diffusers.DiTPipeline(network.transformer, vae, scheduler).save_pretrained(tmp_path)
    pipeline = diffusers.DiTPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    latents = sample(
        lambda x, t: network.denoise(x, t, labels(1, 7), labels(1000, 1000), 4.0),
        scheduler,
        (4, 8, 8),
        5,
        generators(2),
    )
    with torch.no_grad():
        images = vae.decode(latents / vae.config.scaling_factor).sample
    expected = pipeline([1, 7], 4.0, generators(2), 5, output_type='pt').images
    # The pipeline computes both halves of the batch in the same order.
    torch.testing.assert_close((images / 2 + 0.5).clamp(0, 1), expected, rtol=1e-5, atol=1e-5)


def noise_of_gaussian(x: Tensor, t: Tensor) -> Tensor:
    """E[ε | x_t] for pixels N(MEAN, DEVIATION²), and logits of the smaller variance."""
    a = MODELS.build(DDPM).alphas_cumprod[t.long()]
    expected = (1 - a).sqrt() * (x - a.sqrt() * MEAN) / (a * DEVIATION**2 + 1 - a)
    return torch.cat([expected, -torch.ones_like(x)], 1)


def velocity_of_gaussian(x: Tensor, t: Tensor) -> Tensor:
    sigma = t / 1000
    centred = (x - (1 - sigma) * MEAN) / ((1 - sigma) ** 2 * DEVIATION**2 + sigma**2)
    return sigma * centred - MEAN - (1 - sigma) * DEVIATION**2 * centred


@pytest.mark.parametrize(
    ('trained', 'name'),
    [*((DDPM, name) for name in (None, *SCHEDULERS)), (FLOW, None), (FLOW, 'euler')],
)
def test_every_scheduler_draws_from_the_data(trained: dict, name: str | None) -> None:
    """With the exact noise, or velocity, of four 'latent' channels, none a variance."""
    drawn = sample(
        noise_of_gaussian if trained is DDPM else velocity_of_gaussian,
        sampling_scheduler(MODELS.build(trained), name),
        (4, 8, 8),
        50,
        generators(16),
    )
    assert drawn.shape == (16, 4, 8, 8)
    # 4096 numbers, whose standard error is .008; 50 steps narrow the data by up to a tenth.
    assert drawn.mean().item() == pytest.approx(MEAN, abs=0.025)
    assert 0.88 * DEVIATION < drawn.std().item() < 1.03 * DEVIATION


def test_prediction_of_the_image_becomes_a_velocity() -> None:
    network = build(flow_model(loss=dict(type='mmvttt.FlowLoss', prediction='sample')))
    x, told = torch.randn(2, 1, 8, 8), labels(0, 1)
    with torch.no_grad():
        image = network.transformer(x, timestep=torch.tensor(250.0), **told).sample
        velocity = network.denoise(x, torch.tensor(250.0), told)
    torch.testing.assert_close(x - 0.25 * velocity, image)


def test_guidance_of_three_channels() -> None:
    """Compares with a formula; guidance of all channels is diffusers' pipeline above."""
    network = build(model(transformer=dict(in_channels=4)))
    x, t = torch.randn(2, 4, 8, 8), torch.tensor(300)
    with torch.no_grad():
        output = network.denoise(x, t, labels(1, 2), labels(10, 10), 2.5, 'three')
        given, null = (
            network.transformer(x, timestep=t, **c).sample for c in (labels(1, 2), labels(10, 10))
        )
    expected = given.clone()
    expected[:, :3] = (null + 2.5 * (given - null))[:, :3]
    # fp32, another size of batch.
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_seeds_are_apart() -> None:
    """Image 1 of seed 0 is not image 0 of seed 1."""
    states = {image_generator(s, i).initial_seed() for s in range(50) for i in range(50)}
    assert len(states) == 2500
