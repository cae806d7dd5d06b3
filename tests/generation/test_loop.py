"""DiT³ by the library alone: it learns by either loss, and diffusers' schedulers sample it."""

import pytest
import torch

diffusers = pytest.importorskip('diffusers')
from mmvttt.models.generation.dit3 import DiT3  # noqa: E402
from mmvttt.models.generation.losses import DDPMLoss, FlowLoss  # noqa: E402
from mmvttt.models.generation.sampling import (  # noqa: E402
    image_generator,
    sample,
    sampling_scheduler,
)

SMALL = dict(embed_dims=24, num_layers=2, num_heads=2)


@pytest.mark.parametrize('kind', ['noise levels', 'rectified flow'])
def test_it_learns_an_image_and_draws(kind: str) -> None:
    torch.manual_seed(0)
    if kind == 'noise levels':
        scheduler = diffusers.DDPMScheduler(prediction_type='sample', clip_sample=False)
        loss, name = DDPMLoss(scheduler), 'ddim'
    else:
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        loss, name = FlowLoss(scheduler), 'euler'
    latents = torch.linspace(-1, 1, 4 * 6 * 8).view(4, 6, 8).expand(4, -1, -1, -1)
    model = DiT3(arch=SMALL, num_classes=1, out_channels=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    label = torch.zeros(4, dtype=torch.long)

    def value(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        times, noise, noisy = loss.draw(latents)
        output = model(noisy, times, label, return_dict=False)[0]
        return sum(loss(output, latents, noise, noisy, times).values())

    before = value(1000).item()
    for seed in range(24):
        optimizer.zero_grad()
        value(seed).backward()
        optimizer.step()
    assert value(1000).item() < 0.8 * before

    def denoise(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        output = model(x, time.expand(len(x)), label[: len(x)], return_dict=False)[0]
        return loss.for_scheduler(output, x, time)

    def draw(*images: int) -> torch.Tensor:
        generators = [image_generator(0, i) for i in images]
        return sample(denoise, sampling_scheduler(scheduler, name), (4, 6, 8), 3, generators)

    both = draw(0, 1)
    assert both.shape == (2, 4, 6, 8)
    assert both.isfinite().all()
    torch.testing.assert_close(draw(1)[0], both[1])
    assert not torch.allclose(both[0], both[1])
