"""The benchmark measures what it says, and writes it down with the machine it ran on."""

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmvttt.analysis.benchmark import measure, plot, write_csv


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
    assert row.images_per_s == pytest.approx(2000 / row.latency_ms, rel=0.05)
    assert row.peak_mib == pytest.approx(2 * 3 * 32 * 48 * 4 / 2**20, abs=0.1)
    assert (row.mode, row.dtype, row.torch) == ('inference', 'float32', torch.__version__)


def test_memory_grows_with_the_image() -> None:
    network = nn.Conv2d(3, 8, 3, padding=1)
    peaks = [
        measure(network, 'conv', 1, (side, side), repeats=1, warmup=0).peak_mib
        for side in (128, 256)
    ]
    assert peaks[1] == pytest.approx(4 * peaks[0], rel=0.1)


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
    with path.open(newline='') as file:
        read = list(csv.DictReader(file))
    assert [row['height'] for row in read] == ['16', '32', '64']
    assert read[-1]['latency_ms'] == ''
    assert float(read[0]['images_per_s']) == rows[0].images_per_s
    assert {'device', 'threads', 'torch', 'cuda'} <= set(read[0])
    picture = plot(rows, tmp_path / 'plots' / 'rows.png')
    assert picture.read_bytes().startswith(b'\x89PNG')


def test_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match='repeats=0'):
        measure(nn.Identity(), 'n', 1, (8, 8), repeats=0)
