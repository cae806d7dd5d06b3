"""Curves of a run: what mmengine's own writer logged is read back, over resumes, and drawn."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from mmengine.visualization import LocalVisBackend

from mmvttt.analysis.curves import plot_curves, read_scalars, spread_table, summary

TOOL = 'analyze_logs.py'


def log(work_dir: Path, start: str, entries: list[tuple[int, dict]]) -> Path:
    writer = LocalVisBackend(save_dir=str(work_dir / start / 'vis_data'))
    for step, entry in entries:
        writer.add_scalars(entry, step=step)
    return work_dir / start / 'vis_data' / 'scalars.json'


def training(step: int, loss: float) -> tuple[int, dict]:
    entry = dict(lr=1e-6, base_lr=1e-3, time=0.1, loss=loss, loss_mask=loss / 2, acc=50.0)
    return step, dict(entry, epoch=1, iter=step)


def evaluation(epoch: int, ap: float) -> tuple[int, dict]:
    return epoch, {'coco/bbox_mAP_50': ap, 'coco/bbox_mAP_l': -1, 'data_time': 0.0, 'time': 0.1}


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    """Stopped after step 75, resumed from the checkpoint of step 50."""
    first = [training(25, 4.0), training(50, 3.0), evaluation(1, 0.2), training(75, 2.5)]
    second = [training(60, 2.2), training(75, 2.0), training(100, 1.0)]
    second += [evaluation(2, 0.6), evaluation(3, 0.4)]
    log(tmp_path, '20260102_000000', second)
    log(tmp_path, '20260101_000000', first)
    return tmp_path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures, as they are written."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, 'savefig', lambda s, *a, **k: (figures.append(s), save(s, *a, **k)))
    return figures


def test_resumed_runs_are_one_curve(work_dir: Path) -> None:
    train, evaluated = read_scalars(work_dir)
    losses = [(25, 4.0), (50, 3.0), (60, 2.2), (75, 2.0), (100, 1.0)]
    assert list(train['loss'].items()) == losses
    assert set(train) == {'lr', 'base_lr', 'loss', 'loss_mask', 'acc'}
    assert evaluated['coco/bbox_mAP_50'] == {1: 0.2, 2: 0.6, 3: 0.4}
    # A value that COCO left undefined (−1) is shown only where it is asked for.
    assert summary(train, evaluated).splitlines() == [
        'loss 4 at first, 1 at last',
        'coco/bbox_mAP_50 0.4 at 3 (highest 0.6 at 2)',
    ]
    assert summary(train, evaluated, ['coco/bbox_mAP_l']).endswith('(highest -1 at 1)')


def test_picture_shows_every_point(work_dir: Path, drawn: list) -> None:
    """Losses (not accuracy), metrics (not those that are never defined), and the config's lr."""
    out = plot_curves({'a': read_scalars(work_dir)}, work_dir / 'new' / 'c.png')
    left, right, rate = (
        {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        for axes in drawn[0].axes
    )
    assert set(left) == {'loss', 'loss_mask'}
    assert left['loss'] == [[25, 4.0], [50, 3.0], [60, 2.2], [75, 2.0], [100, 1.0]]
    assert right == {'coco/bbox_mAP_50': [[1, 0.2], [2, 0.6], [3, 0.4]]}
    # Not the smallest group's.
    assert list(rate.values()) == [[[step, 1e-3] for step in (25, 50, 60, 75, 100)]]
    assert out.stat().st_size


def test_several_runs_share_their_axes_and_have_a_spread(
    tools: Any, tmp_path: Path, drawn: list
) -> None:
    tools.patch.chdir(tmp_path)
    for name, ap, loss in (('a', 0.2, 1.0), ('b', 0.4, 3.0), ('c', 0.6, 2.0)):
        log(tmp_path / name, '20260101_000000', [training(5, loss), evaluation(1, ap)])
    table = tools(TOOL, 'a', 'b', 'c', '--out', 'all.png')
    left, right, rate = drawn[0].axes
    assert [line.get_label() for line in left.lines] == ['a: loss', 'b: loss', 'c: loss']
    assert [line.get_ydata()[0] for line in right.lines] == [0.2, 0.4, 0.6]
    assert [line.get_label() for line in rate.lines] == ['a', 'b', 'c']
    assert table.splitlines() == [
        '| last | mean | deviation | a | b | c |',
        '| --- | ---: | ---: | ---: | ---: | ---: |',
        '| loss | 2 | 1 | 1 | 3 | 2 |',
        '| coco/bbox_mAP_50 | 0.4 | 0.2 | 0.2 | 0.4 | 0.6 |',
        'curves: all.png',
    ]
    runs = {'a': ({}, {'AP': {1: 0.5}}), 'b': ({'loss': {1: 2.0}}, {})}
    assert spread_table(runs).splitlines()[2:] == [
        '| AP | 0.5 | – | 0.5 | – |',
        '| loss | 2 | – | – | 2 |',
    ]


def test_tool_writes_beside_the_run_and_says_where(tools: Any, work_dir: Path) -> None:
    for options, picture in (((), 'curves.png'), (('--out', work_dir / 'all'), 'all.png')):
        output = tools(TOOL, work_dir, *options)
        assert 'coco/bbox_mAP_50 0.4 at 3' in output
        assert output.endswith(f'curves: {work_dir / picture}\n')
        assert (work_dir / picture).exists()
    error = tools.error(TOOL, work_dir, '--metrics', 'bbox_AP')
    assert "['bbox_AP'] not evaluated in this run; there are ['coco/bbox_mAP_50'" in error


def test_a_line_cut_by_a_kill_is_passed_over(tools: Any, tmp_path: Path) -> None:
    assert f'under {tmp_path}: pass the --work-dir' in tools.error(TOOL, tmp_path)
    file = log(tmp_path, '20260101_000000', [evaluation(1, 0.5), training(5, 2.0)])
    file.write_text(file.read_text() + '{"loss": 1.0, "it')
    assert 'loss 2 at first, 2 at last' in tools(TOOL, tmp_path)
    file.write_text('{"loss": 1.0, "it')
    assert 'nothing to draw' in tools.error(TOOL, tmp_path)
