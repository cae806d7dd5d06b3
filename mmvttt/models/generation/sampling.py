"""Sampling with diffusers' schedulers, with separate random numbers for every image."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmvttt.errors import UsageError

# Schedulers by their names on the command line, for noise levels and for rectified flow.
SCHEDULERS = {
    'ddpm': 'DDPMScheduler',
    'ddim': 'DDIMScheduler',
    'dpm++': 'DPMSolverMultistepScheduler',
    'unipc': 'UniPCMultistepScheduler',
    'euler': 'EulerDiscreteScheduler',
}
_FLOW = {'euler': 'FlowMatchEulerDiscreteScheduler'}

Denoise = Callable[[Tensor, Tensor], Tensor]


def sampling_scheduler(trained: Any, name: str | None = None) -> Any:
    """A scheduler for sampling, with the training scheduler's noise levels or shift.

    Args:
        trained: The scheduler of the training.
        name: One of `SCHEDULERS`, or None for a copy of the training's own.

    Raises:
        UsageError: The scheduler does not fit the model's prediction.
    """
    import diffusers

    if name is None:
        return type(trained).from_config(trained.config)
    flow = not hasattr(trained, 'alphas_cumprod')
    kinds = _FLOW if flow else SCHEDULERS
    if name not in kinds:
        what = 'rectified flow' if flow else 'noise levels'
        raise UsageError(
            f'scheduler {name!r}: the model was trained on {what} '
            f'({type(trained).__name__}); choose one of {", ".join(kinds)}',
            'scheduler',
        )
    kind = getattr(diffusers, kinds[name])
    # It would cut off a learned variance after channel three; `sample` does so at the right
    # channel.
    options = dict(variance_type=None) if name == 'dpm++' else {}
    return kind.from_config(trained.config, **options)


def image_generator(seed: int, index: int) -> torch.Generator:
    """Random numbers of image `index`, independent of the batch and the process."""
    generator = torch.Generator()
    # Neighbouring seeds do not share the random numbers of neighbouring images.
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + index) % 2**63)
    return generator


@torch.inference_mode()
def sample(
    denoise: Denoise,
    scheduler: Any,
    shape: Sequence[int],
    steps: int,
    generators: Sequence[torch.Generator],
    device: torch.device | str = 'cpu',
) -> Tensor:
    """Noise → latents, as the scheduler steps.

    Args:
        denoise: Noisy latents `(B, C, h, w)` and a time `()` → what the scheduler takes, possibly
            with logits of the variance, which only DDPM reads.
        scheduler: See `sampling_scheduler`.
        shape: `(C, h, w)` of an image.
        steps: Number of steps.
        generators: One for each image, of the CPU.
        device: Where to compute. The noise comes from the CPU.

    Returns:
        `(B, C, h, w)` in fp32.
    """
    noise = [torch.randn(tuple(shape), generator=generator) for generator in generators]
    scheduler.set_timesteps(steps, device=device)
    x = torch.stack(noise).to(device) * getattr(scheduler, 'init_noise_sigma', 1.0)
    options = {}
    if 'generator' in inspect.signature(scheduler.step).parameters:
        options = dict(generator=list(generators))
    reads_variance = (
        type(scheduler).__name__ == 'DDPMScheduler'
        and scheduler.config.variance_type == 'learned_range'
    )
    for time in scheduler.timesteps:
        # Schedulers of rectified flow do not scale.
        scale = getattr(scheduler, 'scale_model_input', lambda x, _: x)
        output = denoise(scale(x, time), time)
        if not reads_variance:
            output = output[:, : x.shape[1]]
        x = scheduler.step(output, time, x, **options).prev_sample.float()
    return x
