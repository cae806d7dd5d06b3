"""A run that was stopped and resumed ends as one that never was: bit for bit, nothing repeated.

Tolerance: none. The same numbers are added in the same order.
"""

import multiprocessing
import pickle
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import DefaultSampler
from mmengine.runner import EpochBasedTrainLoop
from PIL import Image

from mmvttt.errors import DataError, ResumeError, UsageError
from mmvttt.openmmlab.compat.checkpoints import load_safely
from mmvttt.openmmlab.reliability import (
    ExactBatchSampler,
    Preempted,
    SeededDataset,
    make_exact,
    settings,
)
from mmvttt.openmmlab.reliability.resume import latest_checkpoint

from ..trainings.ends import BEST, require_same

EPOCHS = {'train_cfg.max_epochs': 3}
# 22 images in batches of 4: 6 steps an epoch.
STEPS = {
    'train_cfg': dict(_delete_=True, by_epoch=False, max_iters=18, val_interval=6),
    'default_hooks.checkpoint': dict(by_epoch=False, interval=6),
}
INFINITE = {**STEPS, 'train_dataloader.sampler.type': 'InfiniteSampler'}
WORKERS = {'train_dataloader.num_workers': 2, 'train_dataloader.persistent_workers': True}
EMA = dict(type='EMAHook', momentum=0.1)
# Groups images by shape, and keeps what is left over between batches.
GROUPED = {'train_dataloader.batch_sampler': dict(type='mmdet.AspectRatioBatchSampler')}


def last(folder: str) -> dict:
    path, passed_over = latest_checkpoint(folder)
    assert not passed_over
    return load_safely(path)


def assert_same_end(folder: str, expected: str, steps: int = 18) -> None:
    """Weights, averaged weights, statistics, optimizer and schedules of two runs' ends agree."""
    ends = last(folder), last(expected)
    for part in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers'):
        require_same(*(end[part] for end in ends))
    assert ends[0]['meta']['iter'] == ends[1]['meta']['iter'] == steps


@pytest.fixture
def train(run: Callable) -> Callable:
    """Trains the noisy model."""
    return partial(run, 'train', config='noisy')


@pytest.mark.parametrize(
    'options',
    [
        {**EPOCHS, **WORKERS},
        {**EPOCHS, **GROUPED},
        STEPS,
        {**INFINITE, **WORKERS, **GROUPED},
    ],
    ids=['epochs-workers', 'epochs-grouped', 'steps', 'infinite-workers'],
)
def test_a_stopped_run_ends_as_an_undisturbed_one(train: Callable, options: dict) -> None:
    if 'train_dataloader.batch_sampler' in options:
        pytest.importorskip('mmdet')
        import mmdet.datasets  # noqa: F401
    whole = train(work_dir='whole', cfg_options=options)
    first = 'epoch_1.pth' if options.get('train_cfg.max_epochs') else 'iter_6.pth'
    # The seed was drawn; a resume from the first checkpoint has to find it there.
    Path('parts').mkdir()
    shutil.copy(Path('whole', first), 'parts')
    # Inside of an epoch; and at its last step, whose end is not reached: not trained once more.
    for step in (9, 12):
        stop = {'custom_hooks': [EMA, dict(type='Terminate', step=step)]}
        with pytest.raises(Preempted):
            train(work_dir='parts', resume='auto', cfg_options={**options, **stop})
        assert last('parts')['meta']['iter'] == step
    rest = train(work_dir='parts', resume='auto', cfg_options=options)
    assert rest.model.seen == whole.model.seen[-len(rest.model.seen) :]
    assert len(rest.model.seen) in (22, 24)
    assert_same_end('parts', 'whole')


def test_a_data_error_keeps_the_steps_before_it(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(work_dir='whole', seed=1, cfg_options=EPOCHS)
    import noisy

    load, items = noisy.NoisyData.__getitem__, []

    def fail_late(self: object, index: int) -> object:
        items.append(index)
        # 22 images to train, 22 to validate, and four batches of the second epoch.
        if len(items) > 60:
            raise DataError(f'image {index} cannot be read')
        return load(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(noisy.NoisyData, '__getitem__', fail_late)
        with pytest.raises(DataError):
            train(work_dir='parts', seed=1, cfg_options=EPOCHS)
    path, _ = latest_checkpoint('parts')
    assert Path(path).name.startswith('iter_')
    train(work_dir='parts', resume='auto', seed=1, cfg_options=EPOCHS)
    assert_same_end('parts', 'whole')


def test_a_validation_that_a_kill_has_swallowed_is_made_up_for(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {**EPOCHS, **BEST}
    train(work_dir='whole', seed=1, cfg_options=best)
    import tiny

    compute = tiny.TinyError.compute_metrics

    def die_in_the_second_epoch(self: object, results: list) -> dict:
        if Path('parts/epoch_2.pth').exists():
            raise KeyboardInterrupt
        return compute(self, results)

    with monkeypatch.context() as patch:
        patch.setattr(tiny.TinyError, 'compute_metrics', die_in_the_second_epoch)
        with pytest.raises(KeyboardInterrupt):
            train(work_dir='parts', seed=1, cfg_options=best)
    rest = train(work_dir='parts', resume='auto', cfg_options=best)
    assert_same_end('parts', 'whole')
    curves = [last(d)['message_hub']['log_scalars']['val/mse'].data[0] for d in ('whole', 'parts')]
    assert len(curves[0]) == 2
    np.testing.assert_array_equal(*curves)
    assert rest.message_hub.get_info('resume_validated') == 18
    (one,), (other,) = (list(Path(d).glob('best_*')) for d in ('whole', 'parts'))
    assert one.name == other.name


def test_a_training_with_a_best_score(train: Callable) -> None:
    """Killed twice: best checkpoint, early stopping and averages go on."""
    # With a prefix, as scores of the toolboxes have.
    score = dict(save_best='own/mse', rule='less')
    early = dict(type='EarlyStoppingHook', monitor='own/mse', rule='less', patience=3, min_delta=0)
    options = {
        'val_evaluator.prefix': 'own',
        'default_hooks.checkpoint': dict(max_keep_ckpts=2, **score),
        'train_cfg.max_epochs': 9,
        'randomness.seed': 2,
    }

    def run(folder: str, *hooks: dict) -> object:
        custom = {'custom_hooks': [EMA, early, dict(type='Remember'), *hooks]}
        return train(work_dir=folder, resume='auto', cfg_options={**options, **custom})

    whole = run('whole')
    for epoch in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            run('parts', dict(type='Interrupt', epoch=epoch))
    rest = run('parts')
    assert rest.epoch == whole.epoch
    assert_same_end('parts', 'whole', whole.iter)
    bests = [sorted(p.name for p in Path(d).glob('*.pth')) for d in ('whole', 'parts')]
    assert bests[0] == bests[1]
    states = [
        (hook.wait_count, hook.best_score) if hasattr(hook, 'wait_count') else vars(hook)
        for runner in (whole, rest)
        for hook in runner.hooks
        if type(hook).__name__ in ('EarlyStoppingHook', 'Remember')
    ]
    assert states[:2] == states[2:]


def config(**changes: object) -> Config:
    return Config(
        dict(
            train_cfg=dict(type='EpochBasedTrainLoop', max_epochs=1),
            train_dataloader=dict(
                batch_size=2,
                drop_last=True,
                dataset=dict(type='NoisyData'),
                sampler=dict(type='DefaultSampler'),
            ),
        )
        | changes
    )


def test_make_exact_changes_a_config_once() -> None:
    cfg = config()
    assert make_exact(cfg) is None
    assert cfg.train_cfg == dict(type='mmvttt.ExactEpochLoop', max_epochs=1)
    assert cfg.train_dataloader.dataset.type == 'mmvttt.SeededDataset'
    assert cfg.train_dataloader.batch_sampler.drop_last
    # torch refuses it with a batch sampler.
    assert 'drop_last' not in cfg.train_dataloader
    once = cfg.to_dict()
    assert make_exact(cfg) is None
    assert cfg.to_dict() == once


class MyLoop(EpochBasedTrainLoop):
    """Does unknown things."""


@pytest.mark.parametrize(
    ('changes', 'reason'),
    [
        (dict(train_cfg=dict(type=MyLoop)), "its loop is 'MyLoop'"),
        (dict(train_dataloader=dict(dataset=[1], sampler=dict())), 'data set or sampler'),
        (dict(train_dataloader=None), 'data loader or loop'),
    ],
)
def test_make_exact_says_what_it_cannot_do(changes: dict, reason: str) -> None:
    cfg = config(**changes)
    before = cfg.to_dict()
    assert reason in make_exact(cfg)
    assert cfg.to_dict() == before


class Data:
    """Numbers and noise."""

    metainfo = 'numbers'

    def __getitem__(self, index: int) -> tuple:
        return index, random.random(), np.random.rand(), torch.rand(()).item()

    def __len__(self) -> int:
        return 5


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> SeededDataset:
    monkeypatch.setattr('mmengine.registry.DATASETS.build', lambda cfg: Data())
    return SeededDataset(dict(type='Data'))


def test_an_item_is_a_function_of_index_and_key(data: SeededDataset) -> None:
    one = data[3, (1, 2)]
    torch.rand(3)
    assert data[3, (1, 2)] == one
    other = data[3, (1, 3)]
    assert all(a != b for a, b in zip(one[1:], other[1:], strict=True))
    assert data[4][0] == 4
    assert len(data) == 5
    # The rest is the wrapped data set's, in a data worker too.
    data.metainfo = 'changed'
    assert data._dataset.metainfo == 'changed'
    copy = pickle.loads(pickle.dumps(data))
    assert copy.metainfo == 'changed'
    assert copy[3, (1, 2)] == one


def test_an_item_is_tried_twice(data: SeededDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server may answer the second time; the item is the same as of the first."""
    expected, tries = data[3, (1, 2)], []
    load = Data.__getitem__

    def flaky(self: Data, index: int) -> object:
        tries.append(index)
        if len(tries) == 1:
            torch.rand(2)
            raise OSError('the server is busy')
        return load(self, index)

    monkeypatch.setattr(Data, '__getitem__', flaky)
    assert data[3, (1, 2)] == expected
    assert tries == [3, 3]


@pytest.mark.parametrize('drop_last', [False, True])
def test_batches_from_any_step(drop_last: bool) -> None:
    def sampler() -> ExactBatchSampler:
        return ExactBatchSampler(DefaultSampler(range(11), seed=3), 2, drop_last=drop_last)

    def batches(step: int, endless: bool, count: int) -> list[list]:
        s = sampler()
        s.begin(step, (7,), endless)
        return [batch for _, batch in zip(range(count), s, strict=False)]

    assert list(sampler()) == []
    n = len(sampler())
    assert n == (5 if drop_last else 6)
    epochs = [batches(n * e, False, 99) for e in range(3)]
    assert [len(e) for e in epochs] == [n] * 3
    assert epochs[0] != epochs[1]
    flat = [batch for epoch in epochs for batch in epoch]
    for step in (0, 1, n - 1, n, 2 * n + 1):
        assert batches(step, False, 99) == flat[step : (step // n + 1) * n]
        assert batches(step, True, 2 * n) == batches(0, True, 9 * n)[step : step + 2 * n]
    assert batches(0, True, 3 * n) == flat
    # The key has the step and the place in the batch.
    assert [key for batch in flat for _, key in batch][:3] == [(7, 0, 0), (7, 0, 1), (7, 1, 0)]


PICTURES = {'train_dataloader.dataset.type': 'NoisyPictures', 'train_dataloader.num_workers': 2}


def draw(red: int) -> None:
    """Writes the pictures of `NoisyPictures`, as files of one size."""
    Path('set').mkdir(exist_ok=True)
    for number in range(22):
        Image.new('RGB', (4, 4), (red, number, 0)).save(f'set/{number}.png', 'BMP')


def test_an_image_that_cannot_be_read_is_named(train: Callable) -> None:
    draw(0)
    options = {**PICTURES, 'train_cfg.max_epochs': 1, 'randomness.seed': 0}
    before = set(multiprocessing.active_children())
    Path('set/3.png').write_bytes(b'')
    message = r"'set/3\.png' is among the empty images"
    held_out = {'val_dataloader.dataset.type': 'NoisyPictures', 'train_cfg.max_epochs': 1}
    with pytest.raises(DataError, match=message):
        train(work_dir='v', cfg_options=held_out)
    with pytest.raises(DataError, match=message):
        train(work_dir='a', cfg_options=options)
    # Though the error still holds what they were reading for.
    assert not set(multiprocessing.active_children()) - before


def test_other_pictures_of_the_same_names_are_refused(train: Callable) -> None:
    draw(0)
    held_out = {'val_dataloader.dataset.type': 'NoisyPictures'}
    options = {**PICTURES, **held_out, **EPOCHS, 'default_hooks.checkpoint.max_keep_ckpts': 1}
    train(work_dir='a', cfg_options={**options, 'train_cfg.max_epochs': 1})
    shutil.copytree('a', 'b')
    draw(1)
    with pytest.raises(ResumeError):
        train(work_dir='a', resume='auto', cfg_options=options)
    options['train_cfg.other_data'] = True
    resumed = train(work_dir='a', resume='auto', cfg_options=options)
    assert len(resumed.model.seen) == 44
    logs = ''.join(path.read_text() for path in Path('a').glob('*/*.log'))
    assert logs.count('the validation data has other contents') == 1
    draw(0)
    del options['train_cfg.other_data']
    train(work_dir='b', resume='auto', cfg_options=options)


def test_ranks_with_other_lengths_are_named(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(own: tuple[str, dict]) -> list:
        facts = {name: '21' if name == 'the number of images' else n for name, n in own[1].items()}
        return [own, ("node 'beta' (rank 1)", facts)]

    monkeypatch.setattr(settings, 'get_world_size', lambda: 2)
    monkeypatch.setattr(settings, 'all_gather_object', other)
    with pytest.raises(UsageError):
        train(work_dir='a')
