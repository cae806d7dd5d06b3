"""The benchmark of a CPU: its contenders and its table."""

import csv
import sys

import pytest
import timm
import torch

pytest.importorskip('numba', reason='numba is not installed')
import cpu as benchmark
import deployment

from ttt_kernels import _backend


def test_what_is_left_out_and_put_back():
    def call():
        return [_backend.load_kernel(op, 'numba') for op in ('ttt_linear', 'deform_attn')]

    everything = call()
    assert not any(isinstance(kernel, str) for kernel in everything)
    assert benchmark.without_numba(call)() == ['left out', 'left out']
    assert benchmark.without_numba(call, 'deform_attn')() == [everything[0], 'left out']
    assert call() == everything


@pytest.mark.parametrize('build', [benchmark.ViT3, benchmark.HViT3])
def test_eager_inner_models_are_the_same_function(build):
    torch.manual_seed(0)
    model = build('tiny').eval()
    images = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        ours, eager = model(images)[-1], benchmark.eager_inner_models(lambda: model(images)[-1])()
    # fp32 sums in another order, through all blocks.
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert not torch.equal(ours, eager)


def test_the_least_of_several_without_the_first():
    ticks = iter([0, 0, 0, 3, 3, 4, 4, 6, 6, 9])
    found = benchmark.least({'a': int, 'b': int}, 2, lambda: next(ticks))
    assert found == {'a': 2000, 'b': 1000}


def test_a_table(tmp_path, monkeypatch):
    case = ('scan', 'T=1', 'fwd', {'numba': int, 'reference': int})
    monkeypatch.setitem(benchmark.CASES, 'scan', lambda: iter([case]))
    monkeypatch.setattr(sys, 'argv', ['cpu.py', '--only', 'scan', '--out', str(tmp_path)])
    assert benchmark.main() == 0
    (path,) = tmp_path.iterdir()
    rows = list(csv.DictReader(path.open()))
    assert [row['contender'] for row in rows] == ['numba', 'reference']
    assert rows[0]['torch'] == torch.__version__
    assert float(rows[0]['ratio']) == 1


def test_the_table_of_deployments_continues_where_it_stopped(tmp_path, monkeypatch, capsys):
    pytest.importorskip('openvino')
    measured = []

    def contenders(name, size, folder):
        measured.append((name, size))
        return {'eager': torch.neg, 'OpenVINO': lambda image: -image}

    monkeypatch.setattr(deployment, 'contenders', contenders)
    monkeypatch.setattr(deployment, 'MODELS', {'A': 'a', 'Swin-T': 'swin'})
    line = ['deployment.py', '--seconds', '0', '--out', str(tmp_path / 'out.csv')]
    monkeypatch.setattr(sys, 'argv', [*line, '--files', str(tmp_path), '--sizes', '8', '1280'])
    assert deployment.main() == 0
    # 1280×1280 is for plain backbones.
    assert measured == [('a', 8), ('a', 1280), ('swin', 8)]
    rows = list(csv.DictReader((tmp_path / 'out.csv').open()))
    assert [row['way'] for row in rows] == 3 * ['eager', 'OpenVINO']
    assert {row['error'] for row in rows} == {'0.0e+00'}
    assert rows[0]['timm'] == timm.__version__
    assert deployment.main() == 0
    assert len(measured) == 3
    swin = rows[-2]['ms']
    assert f'| Swin-T | {swin} / ' in capsys.readouterr().out
    (tmp_path / 'out.csv').write_text((tmp_path / 'out.csv').read_text().replace(',wall,', ',cpu,'))
    with pytest.raises(SystemExit, match=r"'clock': 'cpu'.*another --out"):
        deployment.main()
