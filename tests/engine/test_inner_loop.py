"""The inner-loop hook: the numbers of the analysis in the log, and the training left as it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.dataset import default_collate
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import Tensor, nn

from mmvttt.analysis.inner_training import LayerTraining, inspect_training
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


def train(folder: Path, backbone: nn.Module, **hook: Any) -> Runner:
    torch.manual_seed(0)
    images = [dict(inputs=torch.randn(3, 32, 48)) for _ in range(8)]
    runner = Runner(
        Model(backbone),
        str(folder),
        train_dataloader=dict(
            dataset=images,
            batch_size=2,
            sampler=dict(type='DefaultSampler', shuffle=True),
            collate_fn=default_collate,
        ),
        train_cfg=dict(by_epoch=False, max_iters=6),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_hooks=dict(logger=dict(type='LoggerHook', interval=2), checkpoint=None),
        custom_hooks=[dict(type='mmvttt.InnerLoopHook', **hook)] if hook else [],
        randomness=dict(seed=0),
        default_scope='mmengine',
        experiment_name=folder.name,
    )
    runner.train()
    return runner


def logged(work_dir: Path) -> list[dict]:
    (log,) = work_dir.glob('*/vis_data/scalars.json')
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize('cls', [Vittt, T5])
def test_it_logs_and_changes_nothing(cls: type, tmp_path: Path) -> None:
    weights = []
    for name, hook in (('without', {}), ('with', dict(interval=2))):
        torch.manual_seed(0)
        # Dropped paths draw random numbers, which must stay the same ones.
        runner = train(tmp_path / name, cls(ARCH, drop_path_rate=0.5), **hook)
        weights.append({n: w.clone() for n, w in runner.model.state_dict().items()})
        assert runner.model.training
    assert all(torch.equal(w, weights[1][n]) for n, w in weights[0].items())
    scalars = logged(tmp_path / 'with')
    names = ('inner_drift_min', 'inner_drift_max', 'inner_before', 'inner_after')
    assert [line['step'] for line in scalars if {*names} <= {*line}] == [2, 4, 6]
    assert not any(n.startswith('inner') for line in logged(tmp_path / 'without') for n in line)


def test_the_scalars_are_those_of_the_analysis(tmp_path: Path) -> None:
    torch.manual_seed(1)
    runner = train(tmp_path / 'run', T5(ARCH), interval=100)
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
