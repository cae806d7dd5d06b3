"""The benchmark measures what it says."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import Tensor, nn

from mmvttt.analysis import benchmark
from mmvttt.analysis.benchmark import has_attention, machine, measure, with_attention
from mmvttt.analysis.complexity import computed_peak, plot, slope
from mmvttt.analysis.tables import write_csv


class Doubling(nn.Module):
    """Holds exactly one more image than it was given; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls: list[tuple[tuple[int, ...], bool]] = []

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        self.calls.append((tuple(x.shape), self.training))
        return {'maps': [x * self.weight]}


def test_inference_is_timed_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Doubling()
    ends = (start for end in (100, 100, 100, 1, 2, 3, 4) for start in (0, end))
    monkeypatch.setattr(benchmark, 'time', SimpleNamespace(perf_counter=lambda: next(ends)))
    values = measure(network, torch.rand(2, 3, 32, 48), repeats=4)
    # Three to warm up, four timed, one for the memory.
    assert network.calls == [((2, 3, 32, 48), False)] * 8
    assert values['peak_mib'] == pytest.approx(2 * 3 * 32 * 48 * 4 / 2**20, abs=0.1)
    del values['peak_mib']
    assert values == dict(first_s=100, latency_ms=2500, spread_ms=1500)


def test_training_runs_backward_and_leaves_no_gradients() -> None:
    network = Doubling()
    seen = []
    network.weight.register_hook(lambda grad: seen.append(grad))
    measure(network, torch.rand(1, 3, 16, 16), train=True, repeats=2)
    assert len(seen) == 6
    assert network.weight.grad is None
    assert all(training for _, training in network.calls)


def test_bf16_is_autocast() -> None:
    types, network = [], nn.Conv2d(3, 4, 1)
    network.register_forward_hook(lambda _, args, out: types.append(out.dtype))
    measure(network, torch.rand(1, 3, 8, 8), torch.bfloat16, repeats=1)
    assert set(types) == {torch.bfloat16}


def test_out_of_memory_is_a_row_too(tmp_path: Path) -> None:
    class Network(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] > 32:
                raise torch.OutOfMemoryError('too much')
            return x + 1

    rows = []
    for side in (16, 32, 64):
        about = dict(line='n', height=side, width=side) | machine('cpu')
        rows.append(about | measure(Network(), torch.rand(1, 3, side, side), repeats=1))
    assert 'latency_ms' not in rows[-1]
    with write_csv(rows, tmp_path / 'new' / 'rows.csv').open(newline='') as file:
        table = list(csv.DictReader(file))
    assert [row['torch'] for row in table] == [torch.__version__] * 3
    assert float(table[0]['latency_ms']) == rows[0]['latency_ms']
    assert table[-1]['latency_ms'] == ''
    picture = plot(rows, tmp_path / 'plots' / 'rows.png')
    assert picture.read_bytes().startswith(b'\x89PNG')


def test_a_text_is_not_a_formula_of_a_spreadsheet(tmp_path: Path) -> None:
    texts = ['=1+1', '+1+1', '-1+1', '@SUM(1)', '-1.5e-3', '-inf', 'a=1']
    path = write_csv([dict(x=text) for text in texts], tmp_path / 'rows.csv')
    assert path.read_text().split() == ['x', "'=1+1", "'+1+1", "'-1+1", "'@SUM(1)", *texts[4:]]


def test_slopes_are_against_the_tokens() -> None:
    assert slope([(10, 1), (20, 4), (40, 64)]) == pytest.approx(2)
    assert slope([(10, 5), (20, 20)]) == pytest.approx(1)
    assert slope([(10, 5)]) is slope([(64, 1), (64, 2)]) is None


def test_computed_memory_is_what_is_measured() -> None:
    """Every allocation is an operator's output: equal but for workspaces of a CPU's operators."""
    images = torch.rand(2, 3, 224, 224)
    for train in (False, True):
        network = timm.create_model('deit_tiny_patch16_224', depth=2)
        computed = computed_peak(network, tuple(images.shape), train)
        measured = measure(network, images, train=train, repeats=1)['peak_mib']
        assert computed == pytest.approx(measured, rel=0.03)
    assert next(network.parameters()).device.type == 'cpu'


def test_materialised_attention_stores_the_weights() -> None:
    model = timm.create_model('deit_tiny_patch16_224', depth=2, dynamic_img_size=True)
    peaks = {}
    for kind in ('fused', 'materialised'):
        other = with_attention(model, kind)
        peaks[kind] = computed_peak(other, (1, 3, 512, 512))
        assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    weights = 3 * 1025**2 * 4 / 2**20
    assert peaks['materialised'] - peaks['fused'] >= weights
    assert has_attention(model)
    assert not has_attention(nn.Conv2d(3, 4, 1))
