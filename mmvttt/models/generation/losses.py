"""Losses of diffusion models: DiT's, with learned variances, and rectified flow (SD3)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvttt.arguments import check_choice, check_number
from mmvttt.errors import UsageError

_BIN = 1 / 255


def _column(x: Tensor) -> Tensor:
    """Numbers `(B,)`, to be multiplied with `(B, C, h, w)`."""
    return x[:, None, None, None]


class DDPMLoss:
    """Mean squared error of the noise, and the variational bound of the variance (DiT Sec. 3.1).

    Times are uniform over the scheduler's. With `variance_type='learned_range'` the second half of
    the output is a logit v of the variance, log σ² = f·log β_t + (1 − f)·log β̃_t, f = (v + 1)/2
    (Nichol & Dhariwal 2021, Eq. 15), which is trained only by the bound, in bits per element; the
    noise is trained only by the squared error.

    Args:
        scheduler: A diffusers scheduler with `alphas_cumprod`, such as `DDPMScheduler`.

    Raises:
        UsageError: The scheduler is of another kind, or its model predicts something else.
    """

    def __init__(self, scheduler: Any) -> None:
        if not hasattr(scheduler, 'alphas_cumprod'):
            raise UsageError(
                f'DDPMLoss needs a scheduler of noise levels, such as diffusers.DDPMScheduler, got '
                f'{type(scheduler).__name__}; for rectified flow choose loss mmvttt.FlowLoss'
            )
        self.scheduler = scheduler
        self.learns_variance = scheduler.config.get('variance_type') == 'learned_range'
        # DiT's, the noise.
        check_choice('prediction_type', scheduler.config.prediction_type, ('epsilon',))
        # Not the scheduler's `alphas_cumprod`: 1 − ᾱ has four digits in fp32 near t = 0.
        beta = scheduler.betas.double()
        signal = (1 - beta).cumprod(0)
        before = F.pad(signal[:-1], (1, 0), value=1.0)
        posterior = beta * (1 - before) / (1 - signal)
        # The variance at t = 0 is 0; its logarithm is taken at t = 1 (Nichol & Dhariwal 2021).
        self.log_posterior = posterior.clamp(min=posterior[1]).log()
        self.log_beta = beta.log()
        self.noise_in_start = ((1 - signal) / signal).sqrt()
        self.noisy_in_start = (1 / signal).sqrt()
        self.of_start = beta * before.sqrt() / (1 - signal)
        self.of_noisy = (1 - before) * (1 - beta).sqrt() / (1 - signal)

    def draw(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Times `(B,)`, noise and noisy latents of `(B, C, h, w)` ones."""
        steps = self.scheduler.config.num_train_timesteps
        times = torch.randint(steps, (len(latents),), device=latents.device)
        noise = torch.randn_like(latents)
        return times, noise, self.scheduler.add_noise(latents, noise, times)

    def __call__(
        self, output: Tensor, latents: Tensor, noise: Tensor, noisy: Tensor, times: Tensor
    ) -> dict[str, Tensor]:
        """The losses of an output `(B, C or 2C, h, w)`, in fp32."""
        output = output.float()
        if not self.learns_variance:
            return dict(loss_mse=F.mse_loss(output, noise))
        predicted, logit = output.chunk(2, dim=1)
        bound = self.variational_bound(predicted.detach(), logit, latents, noisy, times)
        return dict(loss_mse=F.mse_loss(predicted, noise), loss_bound=bound.mean())

    def for_scheduler(self, output: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """The output for the scheduler, unchanged."""
        return output

    def variational_bound(
        self, predicted: Tensor, logit: Tensor, latents: Tensor, noisy: Tensor, times: Tensor
    ) -> Tensor:
        """KL of the posterior to the model's step back, in bits per element of an image: `(B,)`.

        At t = 0 it is the negative log-likelihood of the latents under a Gaussian in bins of 1/255,
        as in DiT, although its latents are not in [−1, 1].
        """

        def at(table: Tensor) -> Tensor:
            return _column(table.to(times.device)[times].float())

        start = at(self.noisy_in_start) * noisy - at(self.noise_in_start) * predicted
        mean = at(self.of_start) * start + at(self.of_noisy) * noisy
        true_mean = at(self.of_start) * latents + at(self.of_noisy) * noisy
        part = (logit + 1) / 2
        log_variance = part * at(self.log_beta) + (1 - part) * at(self.log_posterior)
        true_log_variance = at(self.log_posterior)
        divergence = 0.5 * (
            log_variance
            - true_log_variance
            - 1
            + (true_log_variance - log_variance).exp()
            + (true_mean - mean) ** 2 * (-log_variance).exp()
        )
        likelihood = _binned_log_likelihood(latents, mean, log_variance / 2)
        bits = torch.where(_column(times) == 0, -likelihood, divergence) / math.log(2)
        return bits.flatten(1).mean(1)


def _binned_log_likelihood(x: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """log P of the bin of width 2/255 around x under a Gaussian. The outer bins are open."""

    def cdf(edge: Tensor) -> Tensor:
        # DiT's approximation of the normal distribution function; erf has no gradient in its tails.
        z = (edge - mean) * (-log_deviation).exp()
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    above, below = cdf(x + _BIN), cdf(x - _BIN)
    inside = torch.where(x < -0.999, above, torch.where(x > 0.999, 1 - below, above - below))
    return inside.clamp(min=1e-12).log()


class FlowLoss:
    """Rectified flow: x_σ = (1 − σ)·x0 + σ·ε, whose velocity is ε − x0 (SD3, Esser et al. 2024).

    logit σ is drawn from a normal distribution and σ shifted by the scheduler's `shift`, as are the
    times of sampling. The model gets 1000·σ.

    Args:
        scheduler: diffusers' `FlowMatchEulerDiscreteScheduler`.
        prediction: What the model predicts: 'velocity', or 'sample' (x0), from which the velocity
            is (x_σ − x̂0)/σ.
        logit_mean: Mean of logit σ. A larger one is noisier.
        logit_std: Its standard deviation.
        weighting: Of the squared error: 'none'; or 'clamped', min(1/max(σ², 0.04), 6), for
            'sample'.

    Raises:
        UsageError: The scheduler is of another kind.
        ValueError: If an option is not one of those above.
    """

    learns_variance = False

    def __init__(
        self,
        scheduler: Any,
        prediction: str = 'velocity',
        logit_mean: float = 0.0,
        logit_std: float = 1.0,
        weighting: str = 'none',
    ) -> None:
        if 'shift' not in scheduler.config or hasattr(scheduler, 'alphas_cumprod'):
            raise UsageError(
                'FlowLoss needs a scheduler of rectified flow, '
                f'diffusers.FlowMatchEulerDiscreteScheduler, got {type(scheduler).__name__}; for '
                'noise levels choose loss mmvttt.DDPMLoss'
            )
        check_choice('prediction', prediction, ('velocity', 'sample'))
        check_choice('weighting', weighting, ('none', 'clamped'))
        check_number('logit_std', logit_std, above=0)
        if scheduler.config.get('use_dynamic_shifting'):
            raise UsageError(
                'FlowLoss supports a fixed shift only: set use_dynamic_shifting=False in the '
                'scheduler'
            )
        self.scheduler = scheduler
        self.prediction = prediction
        self.logit_mean, self.logit_std = logit_mean, logit_std
        self.weighting = weighting

    def draw(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Times `(B,)` in (0, 1000), noise and noisy latents of `(B, C, h, w)` ones."""
        logit = torch.randn(len(latents), device=latents.device)
        sigma = (self.logit_mean + self.logit_std * logit).sigmoid()
        shift = self.scheduler.config.shift
        sigma = shift * sigma / (1 + (shift - 1) * sigma)
        noise = torch.randn_like(latents)
        noisy = torch.lerp(latents, noise, _column(sigma).to(latents.dtype))
        return sigma * self.scheduler.config.num_train_timesteps, noise, noisy

    def __call__(
        self, output: Tensor, latents: Tensor, noise: Tensor, noisy: Tensor, times: Tensor
    ) -> dict[str, Tensor]:
        """The loss of an output `(B, C, h, w)`, in fp32."""
        target = latents if self.prediction == 'sample' else noise - latents
        error = (output.float() - target) ** 2
        if self.weighting == 'clamped':
            weight = self.sigma(times).square().clamp(min=0.04).reciprocal().clamp(max=6.0)
            error = _column(weight) * error
        return dict(loss_flow=error.mean())

    def for_scheduler(self, output: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """The output for the scheduler: a velocity."""
        return output if self.prediction == 'velocity' else (noisy - output) / self.sigma(time)

    def sigma(self, times: Tensor) -> Tensor:
        """The σ for the model's time."""
        return times / self.scheduler.config.num_train_timesteps
