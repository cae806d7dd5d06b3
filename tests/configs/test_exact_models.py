"""A real recipe, reduced, stopped inside of an epoch and resumed: the end is the same, bit for bit.

Tolerance: none. It has random augmentation in workers, drop path, sampled anchors and RoIs.
"""

import copy
import importlib
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from mmvttt.checkpoints.read import read_content
from mmvttt.openmmlab.apis.train import train
from mmvttt.openmmlab.datasets import make_digits
from mmvttt.openmmlab.reliability import Preempted
from mmvttt.openmmlab.reliability.resume import latest_checkpoint

from ..trainings.ends import require_same

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
TRAININGS = Path(__file__).resolve().parents[1] / 'trainings'
pytestmark = pytest.mark.stress


def demo(folder: Path) -> tuple[Path, dict]:
    """Mask R-CNN with Vittt and its adapter on 24 images of digits: 6 steps an epoch."""
    data = str(make_digits(folder / 'digits', num_train=24, num_val=4)) + '/'
    loaders = {f'{split}_dataloader.dataset.data_root': data for split in ('train', 'val', 'test')}
    return CONFIGS / 'maskrcnn_vittt_demo.py', loaders | {
        'val_evaluator.ann_file': data + 'annotations/instances_val.json',
        'test_evaluator.ann_file': data + 'annotations/instances_val.json',
        'train_dataloader.batch_size': 4,
        'train_dataloader.num_workers': 2,
        'train_dataloader.dataset.pipeline.2': dict(type='RandomResize', ratio_range=(0.7, 1.0)),
        'train_cfg.max_epochs': 2,
        'model.backbone.backbone.drop_path_rate': 0.3,
        'default_hooks.checkpoint.max_keep_ckpts': 5,
    }


def test_a_stopped_recipe_ends_as_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, options = demo(tmp_path)
    monkeypatch.syspath_prepend(str(TRAININGS))
    importlib.import_module('noisy')  # registers Terminate

    def run(work_dir: str, step: int | None = None) -> object:
        changed = {**copy.deepcopy(options), 'experiment_name': f'{config.stem}_{work_dir}_{step}'}
        if step:
            hooks = Config.fromfile(config).get('custom_hooks', [])
            changed['custom_hooks'] = [*hooks, dict(type='Terminate', step=step)]
        return train(config, work_dir=work_dir, resume='auto', seed=0, cfg_options=changed)

    whole = run('whole')
    for step in (3, 8):
        with pytest.raises(Preempted):
            run('parts', step)
        assert latest_checkpoint('parts')[0].endswith(f'iter_{step}.pth')
    rest = run('parts')
    assert rest.iter == whole.iter == 12
    ends = [read_content(latest_checkpoint(d)[0]) for d in ('parts', 'whole')]
    for part in {'state_dict', 'ema_state_dict', 'optimizer'} & ends[1].keys():
        require_same(*(end[part] for end in ends))
    # It has moved: two fresh models would be equal anyway.
    first = read_content('parts/epoch_1.pth')['state_dict']
    assert any(not torch.equal(v, first[k]) for k, v in ends[0]['state_dict'].items())
