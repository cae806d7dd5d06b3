"""The inner-loop hook: the numbers of the analysis in the log, and the training left as it is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from mmvttt.analysis.inner_training import LayerTraining, inspect_training
from mmvttt.errors import UsageError
from mmvttt.models.backbones import T5, Vittt
from mmvttt.openmmlab.analysis.inner_loop_hook import InnerLoopHook

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)


class Model(BaseModel):
    """A backbone whose mean shall be 1."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, inputs: Tensor, data_samples: Any = None, mode: str = 'loss') -> Any:
        return {'loss': (self.backbone(inputs)[0].mean((1, 2, 3)) - 1).square().mean()}


def train(backbone: nn.Module, hook: Hook) -> SimpleNamespace:
    """The runner after six steps."""
    model = Model(backbone)
    runner = SimpleNamespace(model=model, message_hub=MessageHub('inner_loop'))
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(0)
    for runner.iter, images in enumerate(torch.randn(6, 2, 3, 32, 48)):
        batch = dict(inputs=images)
        model.train_step(batch, wrapper)
        hook.after_train_iter(runner, runner.iter, batch)
    return runner


@pytest.mark.parametrize('cls', [Vittt, T5])
def test_it_logs_and_changes_nothing(cls: type) -> None:
    weights = []
    for hook in (Hook(), InnerLoopHook(interval=2)):
        torch.manual_seed(0)
        # Dropped paths draw random numbers, which must stay the same ones.
        runner = train(cls(ARCH, drop_path_rate=0.5), hook)
        weights.append(runner.model.state_dict())
        assert runner.model.training
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    counts = {name: len(curve.data[0]) for name, curve in runner.message_hub.log_scalars.items()}
    names = ('drift_min', 'drift_max', 'before', 'after')
    assert counts == {f'train/inner_{name}': 3 for name in names}


def test_the_scalars_are_those_of_the_analysis() -> None:
    torch.manual_seed(1)
    runner = train(T5(ARCH), Hook())
    image = torch.randn(2, 3, 32, 48)
    hook = InnerLoopHook(interval=1)
    hook.after_train_iter(runner, 0, dict(inputs=image))
    found = runner.message_hub.log_scalars
    scalars = [layer.scalars() for layer in inspect_training(runner.model.backbone, image[:1])]
    drifts = [s['drift'] for s in scalars]
    assert found['train/inner_drift_min'].current() == pytest.approx(min(drifts))
    assert found['train/inner_drift_max'].current() == pytest.approx(max(drifts))
    before = sum(s['loss_first'] for s in scalars) / 2
    assert found['train/inner_before'].current() == pytest.approx(before)


def test_a_layer_is_warned_about_once() -> None:
    hook = InnerLoopHook()
    layer = LayerTraining('blocks.3', (1, 1), torch.arange(1))
    healthy = dict(drift=0.6, loss_first=8.0, loss_last=7.0)
    texts = []
    for values in (
        healthy,
        dict(drift=1e-9),
        dict(drift=1e-9),
        dict(drift=float('nan')),
        dict(loss_first=-1.0, loss_last=-0.5),
    ):
        hook_warned = set(hook._warned)
        hook._warn(layer, {**healthy, **values})
        texts.append(sorted(kind for _, kind in hook._warned - hook_warned))
    assert texts == [[], ['off'], [], ['far'], ['rises']]


def test_a_diffusion_model_is_refused() -> None:
    model = nn.Module()
    model.transformer = nn.Linear(1, 1)
    with pytest.raises(UsageError):
        InnerLoopHook().before_train(SimpleNamespace(model=model))
