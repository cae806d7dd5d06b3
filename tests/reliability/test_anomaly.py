"""A loss that is not finite: the run stops with the weights it had, and names what went wrong."""

import math
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from mmvttt.openmmlab.reliability.anomaly_hook import AnomalyError, AnomalyHook

_RUNS = count()


class Net(BaseModel):
    """`(4,)` per image → two numbers, with what makes a forward depend on more than its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: list[Tensor], mode: str, data_samples: list | None = None) -> dict:
        return self.losses(self.head(self.drop(self.norm(self.body(torch.stack(inputs))))))

    def losses(self, y: Tensor) -> dict:
        return {'loss_a': (y[:, 0] ** 2).mean(), 'loss_b': [y[:, 1].abs().mean()] * 2, 'acc': y[0]}


class Images(list):
    """Eight images in four batches, named image_0.jpg to image_7.jpg."""

    metainfo: dict = {}  # noqa: RUF012

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        super().__init__(
            dict(
                inputs=torch.randn(4, generator=g),
                data_samples=BaseDataElement(metainfo=dict(img_path=f'image_{i}.jpg')),
            )
            for i in range(8)
        )


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Runner]:
    """Trains a model in batches of two; the runner, also of a run that stopped, is in `.runner`."""

    def train(
        model: BaseModel, images: list | None = None, hook: AnomalyHook | None = None, **options
    ) -> Runner:
        sampler = dict(type='DefaultSampler', shuffle=False)
        defaults = dict(
            train_cfg=dict(by_epoch=True, max_epochs=2),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.05)),
            custom_hooks=[AnomalyHook() if hook is None else hook],
        )
        train.runner = Runner(
            model,
            str(tmp_path),
            train_dataloader=dict(
                dataset=images or Images(), batch_size=2, num_workers=0, sampler=sampler
            ),
            experiment_name=f'{tmp_path.name}_{next(_RUNS)}',
            **{**defaults, **options},
        )
        train.runner.train()
        return train.runner

    return train


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.named_parameters()}


def stopped(train: Callable, model: nn.Module, *args, **kwargs) -> str:
    """The message of a run that must stop at its first step, with the weights it began with."""
    before = weights(model)
    with pytest.raises(AnomalyError) as caught:
        train(model, *args, **kwargs)
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0, equal_nan=True)
    assert train.runner.iter == 0
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value)


def test_an_image(train: Callable) -> None:
    images = Images()
    images[3]['inputs'][2] = math.nan
    model = Net()
    with pytest.raises(AnomalyError) as caught:
        train(model, images, randomness=dict(seed=0))
    message = str(caught.value)
    assert 'not finite at step 2 of 8: loss_a = nan' in message
    assert 'Images of this batch: image_2.jpg, image_3.jpg.' in message
    assert 'weights' not in message
    # The second step has not touched what the first one left.
    other = Net()
    train(other, train_cfg=dict(by_epoch=False, max_iters=1), randomness=dict(seed=0))
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=0)


class Odd(Net):
    """A network with other losses of its outputs `(B, 2)`."""

    def __init__(self, losses: Callable[[Tensor], dict]) -> None:
        super().__init__()
        self.losses = losses


# Losses, and words of the message.
TERMS: dict[str, tuple[Callable[[Tensor], dict], str]] = {
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
def test_the_terms_are_named(name: str, train: Callable, tmp_path: Path) -> None:
    losses, words = TERMS[name]
    message = stopped(train, Odd(losses))
    assert words in message
    assert 'weights' not in message
    logs = ''.join(p.read_text() for p in tmp_path.rglob('*.log'))
    assert logs.count('Images of this batch: image_0.jpg, image_1.jpg.') == 1


def test_a_weight(train: Callable) -> None:
    model = Net()
    model.body[2].weight.data *= math.inf
    message = stopped(train, model)
    assert '1 weights are not finite already, first body.2.weight: float32 (8, 8)' in message
    assert 'An earlier update is the cause' in message


def test_a_finite_run_is_left_alone(train: Callable) -> None:
    """Bit for bit: weights, buffers, what was logged and the random numbers after it."""

    def run(*hooks: AnomalyHook) -> tuple:
        model = Net()
        runner = train(model, custom_hooks=list(hooks), randomness=dict(seed=3))
        curve = runner.message_hub.get_scalar('train/loss').data[0].tolist()
        return model.state_dict(), curve, torch.rand(4), model._forward_hooks

    plain, watched = run(), run(AnomalyHook())
    torch.testing.assert_close(watched[0], plain[0], rtol=0, atol=0)
    assert watched[1] == plain[1]
    assert len(watched[1]) == 8
    assert torch.equal(watched[2], plain[2])
    assert not watched[3]


@pytest.mark.parametrize('interval', [3, 100])
def test_a_look_every_few_steps_names_the_step(train: Callable, interval: int) -> None:
    """The setting for a GPU, where a look at each step would wait for the device."""
    images = Images()
    images[2]['inputs'][0] = math.nan
    with pytest.raises(AnomalyError) as error:
        train(
            Net(),
            images,
            hook=AnomalyHook(interval=interval),
            train_cfg=dict(by_epoch=False, max_iters=6),
        )
    message = str(error.value)
    assert 'not finite at step 2 of 6: loss' in message
    assert 'Images of this batch: image_2.jpg, image_3.jpg.' in message
    assert 'interval=1)]' in message
