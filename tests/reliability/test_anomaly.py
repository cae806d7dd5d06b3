"""A loss that is not finite: the run stops with the weights it had, and names what went wrong."""

import math
from collections.abc import Callable
from itertools import cycle, islice
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from mmvttt.openmmlab.reliability.anomaly_hook import AnomalyError, AnomalyHook

Losses = Callable[[Tensor], dict]


def plain_losses(y: Tensor) -> dict:
    return {'loss_a': (y[:, 0] ** 2).mean(), 'loss_b': [y[:, 1].abs().mean()] * 2, 'acc': y[0]}


class Net(BaseModel):
    """`(4,)` per image → two numbers, with what makes a forward depend on more than its weights."""

    def __init__(self, losses: Losses = plain_losses) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 2)
        self.losses = losses

    def forward(self, inputs: list[Tensor], mode: str, data_samples: list | None = None) -> dict:
        return self.losses(self.head(self.drop(self.norm(self.body(torch.stack(inputs))))))


def batches() -> list[dict]:
    """Four batches of two images, named image_0.jpg to image_7.jpg."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    samples = [BaseDataElement(metainfo=dict(img_path=f'image_{i}.jpg')) for i in range(8)]
    return [
        dict(inputs=[*inputs[i : i + 2]], data_samples=samples[i : i + 2]) for i in (0, 2, 4, 6)
    ]


def train(model: BaseModel, data: list[dict], hook: Hook, steps: int = 8) -> list[float]:
    """The loss of every step."""
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.05))
    runner = SimpleNamespace(model=model, max_iters=steps)
    torch.manual_seed(3)
    hook.before_train(runner)
    losses = []
    for runner.iter, batch in enumerate(islice(cycle(data), steps)):
        hook.before_train_iter(runner, runner.iter, batch)
        losses.append(model.train_step(batch, wrapper)['loss'].item())
    hook.after_train(runner)
    return losses


def stopped(model: nn.Module, data: list[dict], hook: AnomalyHook | None = None) -> str:
    """The message of a training that must stop."""
    with pytest.raises(AnomalyError) as caught:
        train(model, data, hook or AnomalyHook())
    assert not model._forward_hooks
    return str(caught.value)


def stopped_at_once(model: nn.Module) -> str:
    """The message of a training that must stop at its first step and keep its weights."""
    before = {n: p.clone() for n, p in model.named_parameters()}
    message = stopped(model, batches())
    after = dict(model.named_parameters())
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert all(p.grad is None for p in model.parameters())
    assert 'Images of this batch: image_0.jpg, image_1.jpg.' in message
    return message


def test_an_image() -> None:
    data = batches()
    data[1]['inputs'][1][2] = math.nan
    model, other = Net(), Net()
    message = stopped(model, data)
    assert 'not finite at step 2 of 8: loss_a = nan' in message
    assert 'Images of this batch: image_2.jpg, image_3.jpg.' in message
    assert 'weights' not in message
    # The second step has not touched what the first one left.
    train(other, data, AnomalyHook(), steps=1)
    weights = dict(model.named_parameters())
    torch.testing.assert_close(weights, dict(other.named_parameters()), rtol=0, atol=0)


# Losses of outputs `(B, 2)`, and words of the message.
TERMS: dict[str, tuple[Losses, str]] = {
    'a division by zero': (
        lambda y: {'loss_a': y.mean() ** 2, 'loss_mask': y.sum() * 0 / y[:0].numel()},
        'loss_mask = nan (finite: loss_a = ',
    ),
    'a term of a list': (
        lambda y: {'loss_cls': [y.mean() ** 2 * 0 + 3, y.mean() / 0]},
        '(finite: loss_cls[0] = 3)',
    ),
    'terms that overflow together': (
        lambda y: {f'loss_{i}': y.mean() * 0 + 3e38 for i in 'ab'},
        'the sum of its terms is inf (finite: loss_a = 3e+38',
    ),
}


@pytest.mark.parametrize('name', TERMS)
def test_the_terms_are_named(name: str, logged: list[str]) -> None:
    losses, words = TERMS[name]
    message = stopped_at_once(Net(losses))
    assert words in message
    assert 'weights' not in message
    assert logged == [message]


def test_a_weight() -> None:
    model = Net()
    model.body[2].weight.data *= math.inf
    message = stopped_at_once(model)
    assert '1 weights are not finite already, first body.2.weight: float32 (8, 8)' in message
    assert 'An earlier update is the cause' in message


def test_a_finite_run_is_left_alone() -> None:
    """Bit for bit: weights, buffers, losses and the random numbers after it."""
    ends = []
    for hook in (Hook(), AnomalyHook()):
        model = Net()
        losses = train(model, batches(), hook)
        assert not model._forward_hooks
        ends.append((model.state_dict(), losses, torch.rand(4)))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.parametrize('interval', [3, 100])
def test_a_look_every_few_steps_names_the_step(interval: int) -> None:
    """The setting for a GPU, where a look at each step would wait for the device."""
    data = batches()
    data[1]['inputs'][0][0] = math.nan
    message = stopped(Net(), data, AnomalyHook(interval))
    assert 'not finite at step 2 of 8: loss' in message
    assert 'Images of this batch: image_2.jpg, image_3.jpg.' in message
    assert 'interval=1)]' in message
