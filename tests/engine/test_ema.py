"""The average of H-ViT³'s weights and statistics against its definition."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmvttt.errors import OptionTypeError
from mmvttt.openmmlab.engine import EMAHook

DECAY, BATCH, BASE = 0.9, 4, 8


def trained(model: nn.Module, hook: EMAHook, steps: int) -> list[dict[str, torch.Tensor]]:
    """The state of the model after each step."""
    runner = SimpleNamespace(
        model=model, iter=0, epoch=0, max_iters=steps, hooks=[hook], _resume=True,
        train_dataloader=SimpleNamespace(batch_sampler=SimpleNamespace(batch_size=BATCH)),
    )  # fmt: skip
    hook.before_train(runner)
    states = []
    for runner.iter in range(steps):
        model(torch.randn(BATCH, 3, 5, 5) * 3 + 1)
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p) / 10
        hook.after_train_iter(runner, runner.iter)
        states.append(copy.deepcopy(model.state_dict()))
    return states


def test_all_of_the_state_is_averaged() -> None:
    """Tolerance: as of fp32 additions in another order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    hook = EMAHook(decay=DECAY, base_batch_size=BASE)
    hook.before_run(SimpleNamespace(model=model))
    first, *states = trained(model, hook, 6)
    keep = DECAY ** (BATCH / BASE)
    expected = first
    for state in states:
        expected = {n: keep * value + (1 - keep) * state[n] for n, value in expected.items()}
    found = hook.ema_model.module.state_dict()
    for name in expected.keys() - {'1.num_batches_tracked'}:
        torch.testing.assert_close(found[name], expected[name])
    # The student's own statistics are others.
    assert not torch.allclose(found['1.running_mean'], model[1].running_mean, rtol=0.01)


def test_an_update_stands_for_all_steps_since_the_last() -> None:
    hook = EMAHook(decay=DECAY, base_batch_size=BASE, interval=3)
    hook.before_run(SimpleNamespace(model=nn.Linear(1, 1, bias=False)))
    trained(nn.Conv2d(3, 4, 3), hook, 0)
    assert hook.ema_model.momentum == pytest.approx(1 - DECAY ** (3 * BATCH / BASE))
    with pytest.raises(OptionTypeError):
        EMAHook(momentum=0.001)
