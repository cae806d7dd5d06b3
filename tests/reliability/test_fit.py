"""A checkpoint of another training is refused before the first step, with the reason."""

import ast
import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModel, BaseTTAModel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from mmvttt.checkpoints.preparation import differences, of_preprocessor, saved_preparation
from mmvttt.errors import CheckpointMismatchError, ResumeError, UsageError
from mmvttt.openmmlab.data.dataset_config import preparation_of
from mmvttt.openmmlab.reliability.fit import require_same_classes, require_weights
from mmvttt.openmmlab.reliability.settings import flatten, training_settings
from mmvttt.openmmlab.unwrap import bare_model

from ..trainings.ends import BEST

TWO = {'train_cfg.max_epochs': 2}


@pytest.fixture
def trained(run: Callable) -> Callable:
    """`trained(options)` resumes a training of one epoch, in the folder a."""
    run('train', config='noisy', work_dir='a', cfg_options={'train_cfg.max_epochs': 1, **BEST})

    def resume(resume: str = 'a/epoch_1.pth', **options: Any) -> Any:
        return run(
            'train', config='noisy', work_dir='b', resume=resume, cfg_options={**TWO, **options}
        )

    return resume


def log() -> str:
    return ''.join(p.read_text() for p in Path('b').glob('*/*.log'))


# Options of another training, and of one that would leave a part of the checkpoint out.
OTHERS: list[dict[str, Any]] = [
    {'model.width': 32},
    {'optim_wrapper.optimizer': dict(_delete_=True, type='SGD', lr=0.01)},
    {'optim_wrapper.optimizer': dict(_delete_=True, type='Adam', lr=0.01)},
    {'train_dataloader.batch_size': 2},
    dict(custom_hooks=[]),
    dict(param_scheduler=[]),
    dict(param_scheduler=None),
]


def test_another_training_is_refused(trained: Callable) -> None:
    content = torch.load('a/epoch_1.pth', weights_only=False)
    del content['param_schedulers']
    torch.save(content, 'a/without.pth')
    for file, lacking in (('a/best_mse_epoch_1.pth', 'optimizer'), ('a/without.pth', 'schedules')):
        with pytest.raises(ResumeError, match=f'has (no|0) {lacking}'):
            trained(file)
    for options in OTHERS:
        with pytest.raises(ResumeError):
            trained(**options)
    # As many batches, and another number of images.
    with pytest.raises(ResumeError, match='images: 22, now 21'):
        trained(**{'train_dataloader.dataset.indices': 21})
    assert 'Epoch(train)' not in log()


def test_a_training_with_groups_of_parameters_goes_on(run: Callable) -> None:
    """mmengine's wrapper has one group more than its optimizer then, of the base rate."""
    options = {'optim_wrapper.paramwise_cfg': dict(bias_lr_mult=2.0)}
    run('train', config='noisy', work_dir='a', cfg_options={**options, 'train_cfg.max_epochs': 1})
    resume = {'work_dir': 'a', 'resume': 'auto', 'cfg_options': {**options, **TWO}}
    assert run('train', config='noisy', **resume).iter == 12


def test_warnings_name_every_other_setting(trained: Callable) -> None:
    trained(**{'train_cfg.max_epochs': 1})
    assert 'keeps the settings' not in log()
    assert 'settings of the resumed' not in log()
    changes = {
        'custom_hooks.0.momentum': 0.2,
        'optim_wrapper.clip_grad': dict(max_norm=1.0),
        'optim_wrapper.accumulative_counts': 2,
        'optim_wrapper.optimizer.lr': 0.5,
        'param_scheduler.T_max': 4,
        'train_dataloader.sampler.shuffle': False,
        'train_dataloader.num_workers': 1,
    }
    trained(**changes)
    (line,) = [x for x in log().splitlines() if 'settings of the resumed' in x]
    for named in (
        'custom_hooks.0.momentum: 0.1 (now: 0.2)',
        'optim_wrapper.clip_grad.max_norm: nothing (now: 1.0)',
        'optim_wrapper.accumulative_counts: nothing (now: 2)',
        'train_dataloader.sampler.shuffle: True (now: False)',
        'train_cfg.max_epochs: 1 (now: 2)',
    ):
        assert named in line
    assert 'num_workers' not in line
    (line,) = [x for x in log().splitlines() if 'keeps the settings of the checkpoint' in x]
    assert 'optim_wrapper.optimizer.lr: 0.01 (config: 0.5)' in line
    assert 'param_scheduler.T_max: 3 (config: 4)' in line


def test_settings_that_end_like_a_place_are_none() -> None:
    backbone = dict(drop_path=0.1, max_per_img=100, data_root='a/', ann_file='b.json')
    cfg = Config(dict(model=dict(backbone=backbone), work_dir='c'))
    assert dict(flatten(cfg)) == {
        'config.model.backbone.drop_path': '0.1',
        'config.model.backbone.max_per_img': '100',
    }


@pytest.mark.parametrize(
    ('options', 'named'),
    [
        (dict(mean=[123.0, 116, 103], std=[58, 57, 57.0], bgr_to_rgb=True), []),
        (dict(mean=[123, 116, 104], std=[58, 57, 57], to_rgb=True), ['mean']),
        (dict(mean=[123, 116, 103], std=[1], pad_size_divisor=32), ['std', 'bgr_to_rgb']),
        (dict(), ['mean', 'std', 'bgr_to_rgb']),
    ],
)
def test_a_file_says_how_its_images_were_prepared(options: dict, named: list) -> None:
    there = dict(mean=[123.0, 116.0, 103.0], std=[58, 57, 57], bgr_to_rgb=True)
    # mmengine ignores the one beside a model that has its own.
    cfg = Config(dict(model=dict(data_preprocessor=there), data_preprocessor=dict(mean=[7.0])))
    saved = saved_preparation(dict(meta=dict(settings=training_settings(cfg))))
    assert [name for name, *_ in differences(saved, of_preprocessor(options))] == named


def test_mean_and_deviation_in_a_step_of_the_pipeline() -> None:
    def cfg(split: str, *pipeline: dict) -> Config:
        return Config({f'{split}_dataloader': dict(dataset=dict(dataset=dict(pipeline=pipeline)))})

    load, step = dict(type='LoadImageFromFile'), dict(type='Normalize', mean=[1.0, 2, 3], std=[4.0])
    settings = training_settings(cfg('train', load, step))
    saved = saved_preparation(dict(meta=dict(settings=settings)))
    for pipeline, named in (
        ([load, step], []),
        ([load, dict(step, to_rgb=False)], ['bgr_to_rgb']),
        ([load, dict(step, mean=[1.0])], ['mean']),
        ([load], ['mean', 'std', 'bgr_to_rgb']),
    ):
        here = preparation_of(cfg('test', *pipeline), 'test', None)
        assert [name for name, *_ in differences(saved, of_preprocessor(here))] == named


class Wrapper(nn.ModuleDict):
    """As DDP: without a process group."""


class Average(BaseTTAModel):
    def merge_preds(self, data_samples_list: list) -> list:
        return data_samples_list


def test_augmented_tests_on_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_WRAPPERS._module_dict, 'Wrapper', Wrapper)
    model = nn.Linear(2, 3)
    model.test_step = lambda data: None
    wrapped = Wrapper(dict(module=Average(model)))
    assert bare_model(model) is bare_model(Average(model)) is bare_model(wrapped) is model
    runner = SimpleNamespace(model=wrapped, cfg={}, test_dataloader=SimpleNamespace(dataset=()))
    require_weights(runner, model.state_dict(), 'a.pth', whole=True)


def test_classes_of_a_checkpoint() -> None:
    content = dict(meta=dict(dataset_meta=dict(classes=('cat', 'dog', 'owl'))))
    for same in (None, ('cat', 'dog', 'owl'), ['cat', 'dog'], ('cat', 'wolf', 'owl')):
        require_same_classes(content, 'a.pth', same)
    for other in (('dog', 'cat', 'owl'), ('cat', 'owl')):
        with pytest.raises(CheckpointMismatchError):
            require_same_classes(content, 'a.pth', other)
    require_same_classes(dict(w=torch.ones(1)), 'a.pth', ('dog',))


def assignments(advice: str) -> dict[str, Any]:
    """What an error or a warning says to set, as --cfg-options."""
    pairs = re.findall(r'((?:\w+\.)+\w+)=([-\w.]+)', advice)
    return {key: ast.literal_eval(value.rstrip('.')) for key, value in pairs}


def applied(options: dict[str, Any], advice: dict[str, Any]) -> dict[str, Any]:
    """The options with an advice that may be about an entry inside one of them."""
    options = copy.deepcopy(options)
    for key, value in advice.items():
        first, *path, last = key.split('.')
        inside = options.get(first)
        if inside is None:
            options[key] = value
        else:
            for part in path:
                inside = inside[int(part)]
            inside[last] = value
    return options


@pytest.mark.parametrize(
    ('counts', 'scaled', 'words'),
    [
        (2, False, None),
        (1, False, 'rate 0.05 is meant for 8 images a step, but this run has 4: without --auto'),
        (1, True, None),
        # mmengine's scaling does not know of the accumulation.
        (2, True, 'rate 0.025 is meant for 4 images a step, but this run has 8: without --auto'),
    ],
)
def test_a_rate_for_another_batch(
    run: Callable, counts: int, scaled: bool, words: str | None
) -> None:
    options = {'train_cfg.max_epochs': 1, 'optim_wrapper.accumulative_counts': counts}
    run('train', work_dir='b', auto_scale_lr=scaled, cfg_options=options)
    assert ('is meant for' in log()) == (words is not None)
    assert (words or '') in log()
    if words:
        advice = assignments(next(x for x in log().splitlines() if 'is meant for' in x))
        shutil.rmtree('b')
        run('train', work_dir='b', cfg_options={**options, **advice})
        assert 'is meant for' not in log()


LINEAR = dict(_delete_=True, type='LinearLR', start_factor=1e-3)
WARMUP = dict(type='LinearLR', start_factor=1e-3, by_epoch=False, end=500)
COSINE = dict(type='CosineAnnealingLR', T_max=36, by_epoch=False)
CONVERTED = dict(LINEAR, end=30, convert_to_iter_based=True)
OURS = dict(LINEAR, type='mmvttt.WarmupCosineLR', warmup_ratio=0.9, convert_to_iter_based=True)
# Epochs of four steps, the schedule or another entry, and the advice.
NOT_LEARNING: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (9, {'param_scheduler.end': 500}, {'param_scheduler.end': 2}),
    (20, {'param_scheduler.end': 60}, {'param_scheduler.end': 4}),
    # It never leaves its first factor.
    (9, dict(param_scheduler=dict(LINEAR, by_epoch=False, end=1)), {'param_scheduler.end': 2}),
    (9, dict(param_scheduler=dict(LINEAR, end=1)), {'param_scheduler.end': 2}),
    (40, dict(param_scheduler=dict(LINEAR, end=40)), {'param_scheduler.end': 2}),
    (40, dict(param_scheduler=CONVERTED), {'param_scheduler.end': 2}),
    (
        9,
        dict(param_scheduler=[WARMUP, COSINE]),
        {'param_scheduler.0.end': 2},
    ),
    (9, dict(param_scheduler=OURS), {'param_scheduler.warmup_ratio': 0.05}),
    (
        9,
        {'optim_wrapper.optimizer.lr': 5e-7},
        {'optim_wrapper.paramwise_cfg': None, 'optim_wrapper.optimizer.lr': 1e-4},
    ),
    (
        9,
        {
            'optim_wrapper.constructor': 'mmvttt.LayerDecayOptimWrapperConstructor',
            'optim_wrapper.paramwise_cfg.layer_decay_rate': 0.5,
            'optim_wrapper.optimizer.weight_decay': 0.0,
            'optim_wrapper.optimizer.lr': 5e-7,
        },
        {
            'optim_wrapper.paramwise_cfg.layer_decay_rate': 1.0,
            'optim_wrapper.optimizer.lr': 1e-4,
        },
    ),
]


@pytest.mark.parametrize(('epochs', 'options', 'advice'), NOT_LEARNING)
def test_the_error_of_a_training_that_cannot_learn_says_what_helps(
    run: Callable, epochs: int, options: dict, advice: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For layer-wise rates.
    monkeypatch.setattr(BaseModel, 'get_layer_depth', lambda *_: (0, 2), raising=False)
    options = {'train_cfg.max_epochs': epochs, **options}
    with pytest.raises(UsageError) as error:
        run('train', work_dir='a', cfg_options=options)
    assert assignments(str(error.value)) == advice
    runner = run('train', work_dir='b', cfg_options=applied(options, advice))
    line = next(x for x in log().splitlines() if 'learning rate of' in x)
    highest, mean = (float(x) for x in re.findall(r'(\S+) (?:at most|on average)', line))
    rate = advice.get('optim_wrapper.optimizer.lr', 0.05)
    assert (runner.iter, highest) == (4 * epochs, pytest.approx(rate, rel=0.02))
    assert mean > 0.4 * rate


@pytest.mark.parametrize(('end', 'epochs'), [(15, 8), (16, 2), (500, 4)])
def test_trials_and_short_warm_ups_run(run: Callable, end: int, epochs: int) -> None:
    options = {'train_cfg.max_epochs': epochs, 'param_scheduler.end': end}
    run('train', work_dir='b', cfg_options=options)
