"""The losses of DiT and of rectified flow, against their formulas in fp64, element by element."""

import math

import pytest
import torch
from torch import Tensor

from mmvttt.errors import DataError, UsageError

from .small import DDPM, DIFFUSERS_DIT, FLOW, flow_model, model

pytest.importorskip('diffusers')
MODELS = pytest.importorskip('mmvttt.openmmlab.registry', exc_type=ImportError).MODELS

T = 1000
BETAS = [1e-4 + (0.02 - 1e-4) * t / (T - 1) for t in range(T)]
SIGNAL = [math.prod(1 - b for b in BETAS[: t + 1]) for t in range(T)]


def normal_cdf(z: float) -> float:
    return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def bound(x0: float, eps: float, eps_hat: float, logit: float, t: int) -> float:
    """Bits of one element at time t, by Ho et al. 2020, Eq. 6 and 7, Nichol & Dhariwal, Eq. 15."""
    before = SIGNAL[t - 1] if t else 1.0
    x_t = math.sqrt(SIGNAL[t]) * x0 + math.sqrt(1 - SIGNAL[t]) * eps
    posterior = [BETAS[s] * (1 - (SIGNAL[s - 1] if s else 1)) / (1 - SIGNAL[s]) for s in (t, 1)]
    true_variance = posterior[0] if t else posterior[1]
    weight0 = BETAS[t] * math.sqrt(before) / (1 - SIGNAL[t])
    weight_t = (1 - before) * math.sqrt(1 - BETAS[t]) / (1 - SIGNAL[t])
    x0_hat = (x_t - math.sqrt(1 - SIGNAL[t]) * eps_hat) / math.sqrt(SIGNAL[t])
    mean, true_mean = (weight0 * x + weight_t * x_t for x in (x0_hat, x0))
    part = (logit + 1) / 2
    variance = math.exp(part * math.log(BETAS[t]) + (1 - part) * math.log(true_variance))
    if t == 0:
        above, below = (normal_cdf((x0 + s / 255 - mean) / math.sqrt(variance)) for s in (1, -1))
        if x0 < -0.999:
            below = 0.0
        elif x0 > 0.999:
            above = 1.0
        return -math.log2(max(above - below, 1e-12))
    ratio = true_variance / variance
    nats = 0.5 * (ratio - 1 - math.log(ratio) + (true_mean - mean) ** 2 / variance)
    return nats / math.log(2)


@pytest.mark.parametrize('t', [0, 1, 2, 437, 999])
def test_variational_bound(t: int) -> None:
    torch.manual_seed(t)
    loss = MODELS.build(model()).loss
    x0 = torch.randn(1, 1, 3, 5) * 0.5
    x0[0, 0, 0, :2] = torch.tensor([-1.0, 1.0])
    noise, predicted, logit = (torch.randn(1, 1, 3, 5) for _ in range(3))
    # Near the truth, so that no likelihood at t = 0 is cut off.
    predicted = noise + 0.1 * predicted
    times = torch.tensor([t])
    noisy = loss.scheduler.add_noise(x0, noise, times)
    bits = loss.variational_bound(predicted, logit, x0, noisy, times)
    values = zip(*(x.flatten().tolist() for x in (x0, noise, predicted, logit)), strict=True)
    expected = sum(bound(*v, t) for v in values) / 15
    # fp32; at t = 0 differences of numbers near 1 are divided by deviations near .01.
    assert bits.item() == pytest.approx(expected, rel=2e-3 if t == 0 else 1e-4, abs=1e-6)


def test_noise_learns_from_the_squared_error_alone() -> None:
    torch.manual_seed(0)
    loss = MODELS.build(model()).loss
    latents = torch.randn(3, 1, 4, 4)
    times, noise, noisy = loss.draw(latents)
    output = torch.randn(3, 2, 4, 4, requires_grad=True)
    losses = loss(output, latents, noise, noisy, times)
    assert losses['loss_mse'].item() == pytest.approx(
        (output[:, :1] - noise).square().mean().item(), rel=1e-6
    )
    (grad,) = torch.autograd.grad(losses['loss_bound'], output)
    assert not grad[:, :1].any()
    assert grad[:, 1:].all()


def test_targets_without_a_learned_variance() -> None:
    torch.manual_seed(0)
    scheduler = dict(DDPM, variance_type='fixed_small')
    loss = MODELS.build(model(scheduler=scheduler, transformer=dict(out_channels=1))).loss
    latents = torch.randn(3, 1, 4, 4)
    times, noise, noisy = loss.draw(latents)
    signal = torch.tensor([SIGNAL[t] for t in times.tolist()])[:, None, None, None]
    # fp32.
    torch.testing.assert_close(noisy, signal.sqrt() * latents + (1 - signal).sqrt() * noise)
    losses = loss(noise + 0.5, latents, noise, noisy, times)
    assert list(losses) == ['loss_mse']
    assert losses['loss_mse'].item() == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize('prediction', ['velocity', 'sample'])
def test_rectified_flow(prediction: str) -> None:
    torch.manual_seed(0)
    config = dict(type='mmvttt.FlowLoss', prediction=prediction, weighting='clamped')
    loss = MODELS.build(flow_model(loss=config)).loss
    latents = torch.randn(5, 1, 4, 4)
    times, noise, noisy = loss.draw(latents)
    sigma = (times / 1000)[:, None, None, None]
    torch.testing.assert_close(noisy, (1 - sigma) * latents + sigma * noise)
    target = latents if prediction == 'sample' else noise - latents
    value = loss(target + 2, latents, noise, noisy, times)['loss_flow'].item()
    weights = [min(1 / max(s**2, 0.04), 6.0) for s in sigma.flatten().tolist()]
    assert value == pytest.approx(4 * sum(weights) / 5, rel=1e-5)


def test_times_of_rectified_flow() -> None:
    """logit σ is N(0.3, 1.2) before the scheduler's shift of 3, σ → 3σ / (1 + 2σ)."""
    torch.manual_seed(0)
    config = dict(type='mmvttt.FlowLoss', logit_mean=0.3, logit_std=1.2)
    loss = MODELS.build(flow_model(loss=config)).loss
    times, _, _ = loss.draw(torch.zeros(20000, 1, 1, 1))
    shifted = times.double() / 1000
    logit = (shifted / (3 - 2 * shifted)).logit()
    # Three standard errors of 20 000 numbers: 3·1.2/√20000, and that over √2.
    assert logit.mean().item() == pytest.approx(0.3, abs=0.026)
    assert logit.std().item() == pytest.approx(1.2, abs=0.018)


@pytest.mark.parametrize('transformer', [model()['transformer'], DIFFUSERS_DIT])
def test_labels_are_dropped_once(transformer: dict) -> None:
    """With the code of diffusers' DiT each block would drop labels by itself."""
    torch.manual_seed(0)
    network = MODELS.build(dict(model(), transformer=transformer)).train()
    seen: list[Tensor] = []
    for module in network.transformer.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    labels = torch.arange(10).repeat(100)
    network(latents=torch.zeros(1000, 1, 8, 8), class_labels=labels, mode='loss')
    assert torch.equal(seen[0], seen[-1])
    dropped = seen[0] == 10
    # Three standard errors.
    assert dropped.double().mean().item() == pytest.approx(0.1, abs=3 * 0.3 / 1000**0.5)
    assert torch.equal(seen[0][~dropped], labels[~dropped])


def test_the_noise_of_a_sample_is_the_same_in_any_batch() -> None:
    torch.manual_seed(0)
    network = MODELS.build(model(test_cfg=dict(steps=2))).eval()
    latents, labels = torch.randn(3, 1, 8, 8), torch.tensor([1, 1, 4])
    together = network(latents, mode='predict', class_labels=labels)
    # As on another rank, with another state of the random numbers.
    torch.rand(5)
    alone = network(latents[1:2], mode='predict', class_labels=labels[1:2])
    assert torch.allclose(alone[0]['image'], together[1]['image'], atol=1e-5)
    assert not torch.allclose(together[0]['image'], together[1]['image'], atol=1e-2)
    network.test_cfg['seed'] = 1
    other = network(latents[1:2], mode='predict', class_labels=labels[1:2])
    assert not torch.allclose(alone[0]['image'], other[0]['image'], atol=1e-2)


@pytest.mark.parametrize(
    'config',
    [
        # Schedulers of the other loss.
        dict(model(), scheduler=FLOW),
        dict(flow_model(), scheduler=DDPM),
        # Channels for a variance that is not learned, and none for one that is.
        model(scheduler=dict(DDPM, variance_type='fixed_small')),
        model(transformer=dict(out_channels=1)),
        model(scheduler=dict(DDPM, prediction_type='sample')),
        # Latents that a scheduler of pixels would clip.
        model(transformer=dict(in_channels=4), scheduler=dict(DDPM, clip_sample=True)),
    ],
)
def test_what_does_not_fit(config: dict) -> None:
    with pytest.raises(UsageError):
        MODELS.build(config)


def test_classes_of_the_data() -> None:
    batch = dict(latents=torch.zeros(2, 1, 8, 8), class_labels=torch.tensor([3, 10]))
    with pytest.raises(DataError):
        MODELS.build(model()).data_preprocessor(batch, True)
