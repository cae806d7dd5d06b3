"""Our schedule against timm's, value by value, and through mmengine's epochs."""

import pytest
import torch
from timm.scheduler import CosineLRScheduler

from mmvttt.errors import OptionError
from mmvttt.openmmlab.engine import WarmupCosineLR
from mmvttt.openmmlab.registry import PARAM_SCHEDULERS


def optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [dict(params=[torch.nn.Parameter(torch.zeros(1))], lr=rate) for rate in rates]
    return torch.optim.SGD(groups)


def rates(schedule: WarmupCosineLR, steps: int) -> list[list[float]]:
    values = []
    for _ in range(steps):
        values.append([group['lr'] for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return values


@pytest.mark.parametrize(('epochs', 'length'), [(300, 2), (30, 7), (9, 3)])
def test_it_is_timms_schedule(epochs: int, length: int) -> None:
    ours = PARAM_SCHEDULERS.build(
        dict(
            type='mmvttt.WarmupCosineLR',
            convert_to_iter_based=True,
            end=epochs,
            warmup_ratio=2 / 30,
        ),
        default_args=dict(optimizer=optimizer(4e-3), epoch_length=length),
    )
    total = epochs * length
    theirs = CosineLRScheduler(
        optimizer(4e-3),
        t_initial=total,
        lr_min=4e-5,
        warmup_t=int(total * 2 / 30),
        warmup_lr_init=4e-6,
        t_in_epochs=False,
    )
    for step, (rate,) in enumerate(rates(ours, total)):
        theirs.step_update(step)
        assert rate == pytest.approx(theirs.optimizer.param_groups[0]['lr'], rel=1e-12), step


@pytest.mark.parametrize(
    'options', [dict(end=10, warmup_ratio=1.5), dict(end=10, start_factor='a'), {}], ids=str
)
def test_mistakes(options: dict) -> None:
    with pytest.raises(OptionError):
        WarmupCosineLR(optimizer(1.0), **options)
