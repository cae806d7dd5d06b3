"""Diffusion models in mmengine's loop: to the bit after a stop, the average, mixed precision."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip('mmengine')

from mmvttt.checkpoints.read import read_content
from mmvttt.openmmlab.apis.evaluate import evaluate
from mmvttt.openmmlab.apis.train import train
from mmvttt.openmmlab.models.diffusion_model import DiffusionModel

from .small import model

pytest.importorskip('diffusers')
pytest.importorskip('sklearn')


@pytest.fixture
def run(tmp_path: Path) -> Callable:
    """`run(folder, steps, …)` trains a reduced copy of the demonstration, as DiT is trained."""
    names = iter(range(10))

    def run(folder: str, steps: int, **options):
        cfg = {
            'experiment_name': f'{tmp_path.name}_{next(names)}',
            'model': dict(model(), _delete_=True),
            'train_dataloader.batch_size': 8,
            'train_cfg.max_iters': steps,
            'train_cfg.val_interval': 100,
            'train_cfg.val_begin': 100,
            'val_cfg': None,
            'val_dataloader': None,
            'val_evaluator': None,
            'default_hooks.checkpoint.interval': 3,
        }
        return train('dit3_digits', work_dir=folder, cfg_options=cfg, **options)

    return run


def test_an_interrupted_training_ends_to_the_bit(run: Callable) -> None:
    """From the checkpoint of step 3, after a kill in step 6."""
    run('whole', 7)
    with pytest.MonkeyPatch.context() as patch:
        step, count = DiffusionModel.train_step, iter(range(100))

        def killed(*args, **kwargs):
            if next(count) == 5:
                raise RuntimeError('killed')
            return step(*args, **kwargs)

        patch.setattr(DiffusionModel, 'train_step', killed)
        with pytest.raises(RuntimeError, match='killed'):
            run('parts', 7)
    run('parts', 7, resume='auto')
    whole, parts = (read_content(f'{folder}/iter_7.pth') for folder in ('whole', 'parts'))
    for key in ('state_dict', 'ema_state_dict'):
        assert set(whole[key]) == set(parts[key])
        for name, value in whole[key].items():
            assert torch.equal(value, parts[key][name]), (key, name)
    # Trained, and averaged.
    assert whole['state_dict']['transformer.final_linear.weight'].any()
    assert not torch.equal(
        whole['state_dict']['transformer.final_linear.weight'],
        whole['ema_state_dict']['module.transformer.final_linear.weight'],
    )


def test_mixed_precision(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    original, types = F.mse_loss, []
    monkeypatch.setattr(F, 'mse_loss', lambda *x: types.extend(y.dtype for y in x) or original(*x))
    runner = run('a', 2, amp=True)
    # Losses are in fp32 whatever the network computes in; so are the weights.
    assert types == [torch.float32] * 4
    assert {p.dtype for p in runner.model.parameters()} == {torch.float32}


def test_evaluation_samples_the_classes(run: Callable) -> None:
    run('a', 1)
    options = {
        'model': dict(model(test_cfg=dict(steps=2, guidance=2.0)), _delete_=True),
        'test_dataloader.dataset.split': 'test',
    }
    metrics = evaluate('dit3_digits', 'a/iter_1.pth', cfg_options=options)
    # The classifier of real digits; of noise it can say nothing.
    assert metrics['digits/real_accuracy'] > 0.97
    assert metrics['digits/frechet'] > 10 * metrics['digits/real_frechet']
    assert metrics['digits/nearest'] > metrics['digits/real_nearest']
