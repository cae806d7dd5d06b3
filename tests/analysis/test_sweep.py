"""Sweeps: variants and lengths by hand, a table with spread, and the tool on a tiny config."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.sweep import (
    Run,
    Variant,
    config_of,
    main_metric,
    require_buildable,
    table_of,
    variants_of,
    write_csv,
)
from mmvttt.openmmlab.reliability.run_lock import RunLock

ROOT = Path(__file__).resolve().parents[2]
TRAININGS = ROOT / 'tests' / 'trainings'
TINY = str(TRAININGS / 'tiny_config.py')
DESIGN = 'model.backbone.design'


def test_variants_are_every_combination_and_named_by_what_differs() -> None:
    actual = variants_of(['folder/a.py', 'b'], {DESIGN: ['dual', 'conv2d'], 'randomness.seed': 3})
    assert [(v.config, v.options) for v in actual] == [
        (config, {DESIGN: design, 'randomness.seed': 3})
        for config in ('folder/a.py', 'b')
        for design in ('dual', 'conv2d')
    ]
    assert [v.name for v in actual[1:3]] == ['a,design=conv2d,seed=3', 'b,design=dual,seed=3']
    assert [v.name for v in variants_of(['folder/a.py', 'b'], {})] == ['a', 'b']
    assert variants_of(['a.py'], {'a.b': [[(1, 2), 'x/y']]})[0].name == 'b=--1--2----x-y--'
    with pytest.raises(UsageError, match='two variants of the sweep have the name a: rename'):
        variants_of(['one/a.py', 'other/a.py'], {})


def variant(options: dict, config: str = TINY) -> Variant:
    return Variant('it', config, options)


def run(variant: str, seed: int, loss: float, metric: float, **others: float) -> Run:
    return Run(variant, seed, dict(AP=metric, **others), loss, 10.0, 1_500_000, 0.25)


def test_the_table_has_mean_and_spread(tmp_path: Path) -> None:
    variants = variants_of([TINY], {DESIGN: ['dual', 'conv2d', 'conv1d']})
    runs = [
        run('design=dual', 0, 1.0, 50.0, AP50=70.0),
        run('design=dual', 1, 2.0, 54.0, AP50=71.0),
        run('design=conv2d', 0, 0.5, 60.0),
    ]
    assert main_metric(runs) == 'AP'
    lines = table_of(runs, variants, None).splitlines()
    assert lines[0].endswith('| AP | last loss | parameters | GFLOPs | ms / step |')
    # The standard deviations of (50, 54) and (1, 2).
    row = '| design=dual | 2 | 52 ± 2.83 | 1.500 ± 0.707 | 1.50 M | 0.25 | 10 ± 0 |'
    assert lines[2] == row
    assert lines[3] == '| design=conv2d | 1 | 60 | 0.500 | 1.50 M | 0.25 | 10 |'
    assert len(lines) == 4
    with write_csv(runs, tmp_path / 'runs.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['AP50'] for row in rows] == ['70.0', '71.0', '']


def test_the_length_is_set_with_the_schedules() -> None:
    """adamw_cosine: 100 steps of warm-up and 6 epochs of 150 steps; a third of it."""
    pytest.importorskip('mmdet')
    cfg = config_of(variant({}, 'upernet_vittt_t_160k'), None, 1600)
    assert cfg.train_cfg.max_iters == cfg.train_cfg.val_interval == 1600
    times = [(s.get('begin'), s.get('end')) for s in cfg.param_scheduler]
    assert times == [(None, 15), (15, 1600)]
    assert cfg.default_hooks.checkpoint.interval == 400


def test_whole_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAININGS))
    # 16 samples in batches of 4: 20 steps are 5 epochs, 2.5 times as many as the config's.
    cfg = config_of(variant({'optim_wrapper.optimizer.lr': 0.1}), None, 20)
    assert cfg.train_cfg.max_epochs == cfg.train_cfg.val_interval == 5
    assert cfg.param_scheduler.end == 20
    assert cfg.optim_wrapper.optimizer.lr == 0.1


@pytest.mark.parametrize(
    ('key', 'value', 'message'),
    [
        ('optim_wraper.optimizer.lr', 1, "nothing reads 'optim_wraper', did you mean 'optim_wr"),
        ('model.backbone.desing', 1, "no option 'desing', did you mean 'design'"),
        (DESIGN, 'dul', r"design=dul: .*choose one of 'ttt_layer'"),
    ],
)
def test_options_and_values_that_do_not_exist_are_refused(
    key: str, value: object, message: str
) -> None:
    pytest.importorskip('mmpretrain')
    with pytest.raises(UsageError, match=message):
        require_buildable(variants_of(['vittt_t_in1k'], {key: [value]}), None)


def sweep(tools: Any, out: Path) -> tuple[str, ...]:
    """The arguments of the tool for two learning rates, of eight steps each."""
    tools.patch.syspath_prepend(str(TRAININGS))
    tools.patch.setenv('PYTHONPATH', str(TRAININGS))
    lr = 'optim_wrapper.optimizer.lr=0.05,0.01'
    return 'sweep.py', TINY, '--over', lr, '--budget-steps', '8', '--out', str(out)


def test_an_interrupted_sweep_goes_on(tools: Any, tmp_path: Path) -> None:
    # The first has ended, with a result that no training gives; the second has not begun.
    first = tmp_path / 'lr=0.05' / 'seed0'
    first.mkdir(parents=True)
    setting = dict(config=TINY, options=None, steps=8, variant={'optim_wrapper.optimizer.lr': 0.05})
    saved = dict(variant='lr=0.05', seed=0, metrics={'mse': 12345.0}, loss=1.0, step_ms=1.0,
                 params=29, gflops=None, setting=setting)  # fmt: skip
    (first / 'result.json').write_text(json.dumps(saved))
    out = tools(*sweep(tools, tmp_path))
    assert '2 of 2: lr=0.01, seed 0' in out
    table = (tmp_path / 'sweep.md').read_text()
    assert table in out
    assert '| lr=0.05 | 1 | 1.23e+04 | 1.000 |' in table
    assert re.search(r'\| lr=0.01 \| 1 \| [\d.]+ \| [\d.]+ \| 0.00 M \|', table)
    assert len((tmp_path / 'sweep.csv').read_text().splitlines()) == 3
    assert not (first / 'config.py').exists()
    out = tools(*sweep(tools, tmp_path), '--metric', 'AP')
    assert "no training has the metric 'AP'; there is mse" in out
    saved['setting']['steps'] = 4
    (first / 'result.json').write_text(json.dumps(saved))
    assert 'is of another sweep' in tools.error(*sweep(tools, tmp_path))


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


def test_a_training_that_fails_is_named_and_the_others_go_on(tools: Any, tmp_path: Path) -> None:
    # A folder in the way of the first run's log.
    (tmp_path / 'lr=0.05' / 'seed0' / 'last_checkpoint').mkdir(parents=True)
    actual = tools.error(*sweep(tools, tmp_path))
    for words in ('failed: lr=0.05, seed 0: ', '| lr=0.01 | 1 |', 'error: 1 of 2 trainings failed'):
        assert words in actual


def test_a_damaged_result_is_named_before_a_training(tools: Any, tmp_path: Path) -> None:
    done = tmp_path / 'lr=0.01' / 'seed0' / 'result.json'
    done.parent.mkdir(parents=True)
    for content in ('{"variant": ', '[]', '{}', '{"setting": 1, "wrong": 2}'):
        done.write_text(content)
        assert f'error: {done} is damaged' in tools.error(*sweep(tools, tmp_path))
    assert not (tmp_path / 'lr=0.05').exists()


def test_one_sweep_at_a_time_in_a_folder(tools: Any, tmp_path: Path) -> None:
    code = (
        'import sys, time\n'
        'from mmvttt.openmmlab.reliability.run_lock import RunLock\n'
        f'RunLock({str(tmp_path)!r}).acquire()\n'
        'print(flush=True)\n'
        'time.sleep(600)\n'
    )
    first = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)
    try:
        first.stdout.readline()
        assert 'give this one another --out' in tools.error(*sweep(tools, tmp_path))
    finally:
        first.kill()
        first.wait()
    assert not (tmp_path / 'lr=0.05').exists()


def test_sigterm_ends_the_training_too(tmp_path: Path) -> None:
    out = tmp_path / 'out'
    environment = {**os.environ, 'PYTHONPATH': str(TRAININGS), 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, str(ROOT / 'tools' / 'sweep.py'), str(TRAININGS / 'noisy_config.py')]
    options = ['--cfg-options', 'train_cfg.max_epochs=100000', '--out', str(out)]
    sweep = subprocess.Popen(
        [*command, *options], env=environment, stderr=subprocess.PIPE, text=True
    )
    output = out / 'noisy_config' / 'seed0' / 'output.txt'
    try:
        end = time.monotonic() + 300
        while not (output.is_file() and 'Epoch(train)' in output.read_text()):
            assert time.monotonic() < end
            assert sweep.poll() is None, sweep.stderr.read()
            time.sleep(0.2)
        sweep.terminate()
        _, text = sweep.communicate(timeout=120)
    finally:
        sweep.kill()
    assert sweep.returncode == 1
    assert 'interrupted: the same command continues from here' in text
    # The training has saved, and let go of its folder.
    assert 'SIGTERM: stopped with' in output.read_text()
    RunLock(output.parent).acquire()
