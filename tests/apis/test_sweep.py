"""Sweeps: variants and lengths by hand, a table with spread, and the tool on a tiny config."""

import json
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config

from mmvttt.errors import MissingDataError, UsageError
from mmvttt.openmmlab.apis.sweep import table_of, variants_of, write_config

ROOT = Path(__file__).resolve().parents[2]
TRAININGS = ROOT / 'tests' / 'trainings'
TINY = str(TRAININGS / 'tiny_config.py')
DESIGN = 'model.backbone.design'


def test_variants_are_every_combination_and_named_by_what_differs() -> None:
    actual = variants_of(['folder/a.py', 'b'], {DESIGN: ['dual', 'conv2d'], 'randomness.seed': 3})
    assert list(actual.values()) == [
        (config, {DESIGN: design, 'randomness.seed': 3})
        for config in ('folder/a.py', 'b')
        for design in ('dual', 'conv2d')
    ]
    assert list(actual)[1:3] == ['a,design=conv2d,seed=3', 'b,design=dual,seed=3']
    assert list(variants_of(['folder/a.py', 'b'], {})) == ['a', 'b']
    assert list(variants_of(['a.py'], {'a.b': [[(1, 'x/y')]]})) == ['b=--1,--x-y---']
    with pytest.raises(UsageError, match='two variants of the sweep have the name a: rename'):
        variants_of(['one/a.py', 'other/a.py'], {})


def test_the_table_has_mean_and_spread() -> None:
    rows = [
        dict(variant='dual', seed=0, loss=1.0, AP50=70.0, AP=50.0),
        dict(variant='conv2d', seed=0, loss=0.5, AP=60.0),
        dict(variant='dual', seed=1, loss=2.0, AP50=71.0, AP=54.0),
    ]
    # AP50 has no value of conv2d. The standard deviations are of (50, 54) and (1, 2).
    assert table_of(rows, None).splitlines() == [
        '| variant | seeds | AP | last loss |',
        '| --- | ---: | ---: | ---: |',
        '| dual | 2 | 52 ± 2.83 | 1.500 ± 0.707 |',
        '| conv2d | 1 | 60 | 0.500 |',
    ]
    assert '| conv2d | 1 |  | 0.500 |' in table_of(rows, 'AP50')
    with pytest.raises(UsageError, match="no training has the metric 'mIoU'; there is AP50, AP"):
        table_of(rows, 'mIoU')


def test_the_length_is_set_with_the_schedules(tmp_path: Path) -> None:
    """adamw_cosine: 100 steps of warm-up and 6 epochs of 150 steps; a third of it."""
    pytest.importorskip('mmseg')
    cfg = Config.fromfile(write_config('upernet_vittt_t_160k', {}, 1600, tmp_path))
    assert cfg.train_cfg.max_iters == cfg.train_cfg.val_interval == 1600
    times = [(s.get('begin'), s.get('end')) for s in cfg.param_scheduler]
    assert times == [(None, 15), (15, 1600)]
    assert cfg.default_hooks.checkpoint.interval == 400


def test_whole_epochs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(TRAININGS))
    # 16 samples in batches of 4: 20 steps are 5 epochs, 2.5 times as many as the config's.
    options = {'optim_wrapper.optimizer.lr': 0.1, 'train_cfg.val_begin': 9}
    path = write_config(TINY, options, 20, tmp_path)
    cfg = Config.fromfile(path)
    assert cfg.train_cfg.max_epochs == cfg.train_cfg.val_interval == 5
    assert 'val_begin' not in cfg.train_cfg
    assert cfg.param_scheduler.end == 20
    assert cfg.optim_wrapper.optimizer.lr == 0.1
    pytest.importorskip('mmdet')
    with pytest.raises(MissingDataError, match=r'train_dataloader\.dataset\.data_root'):
        write_config('maskrcnn_vittt_demo', {}, 20, tmp_path / 'b')


def test_a_value_that_does_not_exist_is_refused(tools: Any, tmp_path: Path) -> None:
    pytest.importorskip('mmpretrain')
    options = ('vittt_t_in1k', '--over', f'{DESIGN}=dual,dul', '--out', str(tmp_path))
    assert "choose one of 'ttt_layer'" in tools.error('sweep.py', *options)
    assert not list(tmp_path.glob('*/seed0'))


def sweep(tools: Any, out: Path) -> tuple[str, ...]:
    """The arguments of the tool for two learning rates, of eight steps each."""
    tools.patch.syspath_prepend(str(TRAININGS))
    tools.patch.setenv('PYTHONPATH', str(TRAININGS))
    lr = 'optim_wrapper.optimizer.lr=0.05,0.01'
    return 'sweep.py', TINY, '--over', lr, '--budget-steps', '8', '--out', str(out)


def test_an_interrupted_sweep_continues(tools: Any, tmp_path: Path) -> None:
    # The first has ended, with a result that no training gives; the second fails, as a folder is in
    # the way of its checkpoint.
    first, second = (tmp_path / f'lr={lr}' / 'seed0' for lr in (0.05, 0.01))
    first.mkdir(parents=True)
    (first / 'result.json').write_text(json.dumps(dict(loss=1.0, mse=12345.0)))
    (second / 'last_checkpoint').mkdir(parents=True)
    error = tools.error(*sweep(tools, tmp_path))
    for words in ('failed: lr=0.01, seed 0: ', '| lr=0.05 | 1 |', 'error: 1 of 2 trainings failed'):
        assert words in error
    (second / 'last_checkpoint').rmdir()
    out = tools(*sweep(tools, tmp_path))
    assert '2 of 2: lr=0.01, seed 0\n' in out
    table = (tmp_path / 'sweep.md').read_text()
    assert table in out
    assert '| lr=0.05 | 1 | 1.23e+04 | 1.000 |' in table
    loss, mse = json.loads((second / 'result.json').read_text()).values()
    assert f'| lr=0.01 | 1 | {mse:.3g} | {loss:.3f} |' in table
    assert (tmp_path / 'sweep.csv').read_text() == (
        f'variant,seed,loss,mse\nlr=0.05,0,1.0,12345.0\nlr=0.01,0,{loss},{mse}\n'
    )
    assert [path.name for path in first.iterdir()] == ['result.json']
    assert 'is of another sweep' in tools.error(*sweep(tools, tmp_path), '--budget-steps', '4')


def test_a_training_that_is_stopped_is_not_taken_for_done(tools: Any, tmp_path: Path) -> None:
    config = tmp_path / 'stopped.py'
    config.write_text(
        f"_base_ = '{TRAININGS / 'noisy_config.py'}'\n"
        "custom_hooks = [dict(type='Terminate', step=9)]\n"
    )
    tools.patch.setenv('PYTHONPATH', str(TRAININGS))
    tools.patch.syspath_prepend(str(TRAININGS))
    arguments = 'sweep.py', str(config), '--out', str(tmp_path / 'out')
    assert 'failed: stopped, seed 0: ' in tools.error(*arguments)
    done = tmp_path / 'out' / 'stopped' / 'seed0'
    assert not (done / 'result.json').exists()
    assert '1 of 1: stopped, seed 0' in tools(*arguments)
    assert (done / 'epoch_3.pth').exists()
