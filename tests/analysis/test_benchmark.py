"""The benchmark measures what it says, and writes it down with the machine it ran on."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from mmvttt.analysis import cost_curves, pictures
from mmvttt.analysis.benchmark import (
    Measurement,
    choose_attention,
    compute,
    measure,
    read_csv,
    write_csv,
)
from mmvttt.analysis.cost_curves import crossings, describe_crossings, lines_of, plot, slope


class Doubling(nn.Module):
    """Holds exactly one more image than it was given; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls: list[tuple[tuple[int, ...], bool]] = []

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        self.calls.append((tuple(x.shape), self.training))
        return {'maps': [x * self.weight]}


def test_inference_is_timed_after_the_warm_up() -> None:
    network = Doubling()
    row = measure(network, 'doubling', 2, (32, 48), repeats=3, warmup=2)
    # Two to warm up, three timed, one for the memory.
    assert network.calls == [((2, 3, 32, 48), False)] * 6
    # To the rounding of the milliseconds.
    assert row.latency_ms == pytest.approx(2000 / row.images_per_s, rel=0.01, abs=5e-4)
    assert row.peak_mib == pytest.approx(2 * 3 * 32 * 48 * 4 / 2**20, abs=0.1)
    assert (row.mode, row.dtype, row.torch) == ('inference', 'float32', torch.__version__)
    assert row.spread_ms >= 0
    assert re.fullmatch(r'20\d\d-\d\d-\d\d', row.date)


def test_training_runs_backward_and_leaves_no_gradients() -> None:
    network = Doubling()
    seen = []
    network.weight.register_hook(lambda grad: seen.append(grad))
    row = measure(network, 'doubling', 1, (16, 16), train=True, repeats=2, warmup=1)
    assert row.mode == 'training'
    assert len(seen) == 4
    assert network.weight.grad is None
    assert all(training for _, training in network.calls)


def test_bf16_is_autocast() -> None:
    types = []

    class Network(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            types.append(y.dtype)
            return y

    row = measure(Network(3, 4, 1), 'conv', 1, (8, 8), dtype=torch.bfloat16, repeats=1, warmup=0)
    assert set(types) == {torch.bfloat16}
    assert row.dtype == 'bfloat16'


def test_out_of_memory_is_a_row_too(tmp_path: Path) -> None:
    class Network(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] > 32:
                raise torch.OutOfMemoryError('too much')
            return x + 1

    rows = [measure(Network(), 'n', 1, (side, side), repeats=1, warmup=0) for side in (16, 32, 64)]
    assert rows[-1].latency_ms is rows[-1].images_per_s is rows[-1].peak_mib is None
    path = write_csv(rows, tmp_path / 'new' / 'rows.csv')
    columns = path.read_text().splitlines()[0].split(',')
    assert {'device', 'threads', 'date', 'commit', 'torch', 'cuda'} <= set(columns)
    assert read_csv(path) == rows
    picture = plot([rows], tmp_path / 'plots' / 'rows.png')
    assert picture.read_bytes().startswith(b'\x89PNG')


def rows_of(name: str, costs: dict[int, float], **others: object) -> list[Measurement]:
    """Rows of a made-up model: GFLOPs by the side of the image."""
    model = nn.Conv2d(3, 1, 1)
    row = compute(model, name, 1, (8, 8))
    return [
        replace(row, height=side, width=side, gflops=cost, peak_mib=None, **others)
        for side, cost in costs.items()
    ]


def test_crossings_are_exact_for_polynomials_in_the_tokens() -> None:
    sides = (100, 200, 400)
    linear = rows_of('linear', {s: 30 * s**2 for s in sides})
    square = rows_of('square', {s: 10 * s**2 + s**4 / 1000 for s in sides})
    rows = [*linear, *square]
    # 30 T = 10 T + T²/1000 at T = 20 000 pixels.
    assert crossings(rows, 'gflops') == [('linear', 'square', pytest.approx(20000**0.5))]
    (sentence,) = describe_crossings(rows)
    assert sentence.startswith('FLOPs: linear needs less than square from 141×141 pixels on (78 ')
    assert crossings(linear, 'gflops') == crossings(rows, 'latency_ms') == []


def test_costs_below_a_decade_have_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logarithmic axes without small ticks had one or none."""
    drawn = []
    monkeypatch.setattr(pictures, 'save', lambda figure, path: drawn.append(figure))
    cost_curves.plot([rows_of('a', {100: 3.1e9, 200: 4.2e9})], 'a.png')
    (figure,) = drawn
    figure.canvas.draw()
    low, high = (axis := figure.axes[0].yaxis).get_view_interval()
    shown = [
        tick
        for minor in (False, True)
        for tick, text in zip(
            axis.get_ticklocs(minor=minor), axis.get_ticklabels(minor=minor), strict=True
        )
        if low <= tick <= high and text.get_text()
    ]
    assert len(shown) >= 2


def test_slopes_are_against_the_tokens() -> None:
    assert slope([(10, 1), (20, 4), (40, 64)]) == pytest.approx(2)
    assert slope([(10, 5), (20, 20)]) == pytest.approx(1)
    assert slope([(10, 5)]) is None


def test_computed_memory_is_what_is_measured() -> None:
    """Every allocation is an operator's output: equal but for workspaces of a CPU's operators."""
    for train in (False, True):
        network = timm.create_model('deit_tiny_patch16_224', depth=2)
        computed = compute(network, 'deit', 2, (224, 224), train=train)
        measured = measure(network, 'deit', 2, (224, 224), train=train, repeats=1, warmup=0)
        assert computed.peak_mib == pytest.approx(measured.peak_mib, rel=0.03)
        assert computed.latency_ms is None
    assert next(network.parameters()).device.type == 'cpu'


def test_materialised_attention_stores_the_weights() -> None:
    model = timm.create_model('deit_tiny_patch16_224', depth=2, dynamic_img_size=True)
    peaks = {}
    for kind in ('fused', 'materialised'):
        assert choose_attention(model, kind)
        peaks[kind] = compute(model, 'deit', 1, (512, 512)).peak_mib
    weights = 3 * 1025**2 * 4 / 2**20
    assert peaks['materialised'] - peaks['fused'] >= weights
    assert not choose_attention(nn.Conv2d(3, 4, 1), 'fused')


def test_models_that_differ_in_their_patches_are_two_lines() -> None:
    fine = rows_of('vit_small_patch16_224', {64: 4.0, 128: 16.0})
    coarse = rows_of('vit_small_patch32_224', {64: 1.0, 128: 4.0})
    other = rows_of('swin_tiny_patch4_window7_224', {64: 1.0, 128: 4.0})
    assert list(lines_of([*fine, *coarse, *other], 'gflops')) == [
        'vit_small_patch16_224', 'vit_small_patch32_224', 'swin_tiny',
    ]  # fmt: skip
    assert slope([(64.0, 1.0), (64.0, 2.0)]) is None
