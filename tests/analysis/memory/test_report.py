"""The report of a step: activations, recomputing, parts; the committed tables and the tool."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.memory import report as memory
from mmvttt.openmmlab.analysis.memory.report import memory_use, to_row, to_table
from mmvttt.openmmlab.analysis.models import find_model

from .reduced import SIZE, reduced, use_of

ROOT = Path(__file__).resolve().parents[3]
TABLES = sorted((ROOT / 'docs/benchmarks').glob('memory_*.csv'))


@pytest.mark.stress
def test_recomputing_more_holds_less() -> None:
    none, backbone, everything = (
        use_of('maskrcnn_vittt_t_1x', what) for what in ('none', 'backbone', 'all')
    )
    assert none.activations > backbone.activations > everything.activations
    assert none.peak > backbone.peak > everything.peak
    for use in (backbone, everything):
        assert (use.weights, use.gradients) == (none.weights, none.gradients)
        assert use.optimizer == none.optimizer


@pytest.mark.parametrize('name', ['maskrcnn_vittt_t_1x', 'maskrcnn_hvit3_t_1x'])
def test_what_recomputes(name: str) -> None:
    model = find_model(reduced(name), weightless=True).model
    for what in memory.CHECKPOINTING:
        memory.set_checkpointing(model, what)
        switches = {n: m.with_cp for n, m in model.named_modules() if hasattr(m, 'with_cp')}
        for switch, on in switches.items():
            adapter = 'interactions' in switch
            assert on == (what == 'all' or (what == 'backbone' and not adapter)), switch
        assert ('backbone.interactions.1' in switches) == ('vittt' in name)
        assert {'backbone.backbone', 'backbone.stages.3'} & set(switches)


def test_parts_are_the_modules_that_run() -> None:
    use = use_of('vittt_t_in1k', 'none')
    assert (use.height, use.width, use.how) == (*SIZE, 'computed')
    weights, activations = use.parts['backbone']
    inner, inside = use.parts['backbone.blocks.0']
    assert 0 < inner < weights < use.weights
    assert 0 < inside < activations < use.activations
    names = list(use.parts)
    assert names.index('backbone.blocks.0') < names.index('backbone.blocks.1')


def test_activations_by_hand() -> None:
    """Linear keeps its input, GELU its own, and each of them is counted once."""
    from mmvttt.analysis.memory.track import MemTracker, by_kind

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    x, tracker = torch.randn(5, 8), MemTracker()
    tracker.track_external(model, x)
    given = 4 * (8 * 16 + 16 + 16 * 2 + 2 + 5 * 8)
    assert by_kind(tracker).total() == given
    with tracker:
        loss = model(x).sum()
        held = by_kind(tracker)
        loss.backward()
        after = by_kind(tracker)
    assert (held['parameters'], held['images, averaged copy']) == (given - 4 * 40, 4 * 40)
    assert held['activations'] == 4 * (5 * 16 + 5 * 16 + 1)
    assert after['gradients'] == held['parameters']


def test_measuring_takes_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch of a GPU, with a stand-in for torch's allocator."""
    calls: list[str] = []
    for name in ('synchronize', 'reset_peak_memory_stats'):
        monkeypatch.setattr(torch.cuda, name, lambda _, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda _: 10**9)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda _: 'some GPU')
    name, device = reduced('hvit3_t_mesa_in1k'), torch.device('cpu')
    measured = memory_use(name, 2, SIZE, 'none', device=device)
    computed = memory_use(name, 2, SIZE, 'none')
    assert (measured.with_cp, measured.amp) == ('config', 'none')
    assert calls == 2 * ['synchronize', 'reset_peak_memory_stats'] + ['synchronize']
    assert (measured.peak, measured.how) == (10**9, 'some GPU')
    assert measured.at_peak == computed.at_peak
    assert computed.peak == sum(computed.at_peak.values())
    assert computed.peak > computed.weights + computed.activations


@pytest.mark.skipif(not torch.cuda.is_available(), reason='measures on a GPU')
def test_a_measured_peak_is_near_the_computed_one() -> None:
    name = 'maskrcnn_vittt_t_1x'
    measured = memory_use(name, 2, (400, 640), device=torch.device('cuda'))
    computed = memory_use(name, 2, (400, 640))
    # Above: workspaces of convolutions, scratch of kernels, rounding; below by nothing but theirs.
    assert 0.97 * computed.peak < measured.peak < 1.5 * computed.peak


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


@pytest.mark.stress
def test_a_row_of_the_tables_is_what_is_computed_now() -> None:
    (row,) = (
        row
        for path in TABLES
        for row in rows_of(path)
        if (row['config'], row['with_cp'], row['amp']) == ('upernet_vittt_t_160k', 'all', 'bf16')
    )
    now = to_row(memory_use('upernet_vittt_t_160k', with_cp='all', amp='bf16'))
    if row['torch'] == now['torch']:
        assert row == now, 'write docs/benchmarks/memory_*.csv again, as docs/memory.md says'
    # Other versions of torch may save other tensors.
    assert float(row['peak_mib']) == pytest.approx(float(now['peak_mib']), rel=0.05)


@pytest.mark.parametrize('path', TABLES, ids=lambda path: path.stem)
def test_the_document_shows_the_tables(path: Path) -> None:
    rows = rows_of(path)
    assert {row['how'] for row in rows} == {'computed'}
    text = (ROOT / 'docs/memory.md').read_text()
    assert f'benchmarks/{path.name}' in text
    assert to_table(rows) in text
    for config in {row['config'] for row in rows}:
        assert (ROOT / f'configs/{config}.py').is_file()


def test_the_tool_prints_parts_and_writes_a_csv(tools: Any, tmp_path: Path) -> None:
    args = (reduced('vittt_t_in1k'), '--computed', '--shape', '64', '96')
    out = tools('get_memory.py', *args)
    assert 'backbone.blocks.1' in out
    assert 'backbone.blocks.1.mixer' not in out
    assert 'vittt_t_in1k, 2 images of 64×96: a peak of' in out
    assert 'computed, without what kernels allocate for themselves' in out
    path = tmp_path / 'new' / 'memory.csv'
    out = tools('get_memory.py', *args, '--with-cp', 'none', 'all', '--out', path)
    rows = rows_of(path)
    assert [row['with_cp'] for row in rows] == ['none', 'all']
    assert float(rows[1]['activations_mib']) < float(rows[0]['activations_mib'])
    assert to_table(rows) in out


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['nothing_1x'], "there is no model 'nothing_1x'"),
        (
            ['deit_tiny_patch16_224', '--with-cp', 'all'],
            'is not a config of mmdet, mmseg, mmpretrain',
        ),
        (['dit3_digits'], 'dit3_digits trains a '),
        (['vittt_t_in1k', '--batch', '0'], "--batch: '0': give an integer, 1 or more"),
    ],
)
def test_mistakes_in_the_command_line(tools: Any, args: list[str], message: str) -> None:
    status = 2 if message.startswith('--') else 1
    assert message in tools.error('get_memory.py', *args, status=status)


def test_mistakes_in_a_call() -> None:
    with pytest.raises(ValueError, match="with_cp='blocks': choose one of None, 'none', 'back"):
        memory_use('vittt_t_in1k', with_cp='blocks')
    model = nn.Module()
    model.backbone = nn.Linear(1, 1)
    with pytest.raises(UsageError, match='Linear has no with_cp'):
        memory.set_checkpointing(model, 'all')
