"""The benchmark of ttt_glu compares like with like, writes a table, and refuses to time a CPU."""

import csv
import os
import subprocess
import sys

import pytest
import torch
import ttt_glu as benchmark
from kernel_testing import error


def run(*arguments):
    return subprocess.run(
        [sys.executable, benchmark.__file__, *arguments],
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize('shape', benchmark.SMOKE, ids=lambda shape: shape.op)
def test_the_eager_formula_is_the_same_function(shape):
    torch.manual_seed(0)
    inputs = benchmark.inputs_of(shape, torch.device('cpu'), torch.float32)
    results = []
    for contender in (benchmark.ours, benchmark.eager):
        output = contender(shape)(*inputs)
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    # fp32 sums of 35 terms in another order.
    assert max(error(x, y) for x, y in zip(*results, strict=True)) < 1e-5


@pytest.mark.stress
def test_smoke(tmp_path):
    found = run('--device', 'cpu', '--smoke', '--out', str(tmp_path))
    assert found.returncode == 0, found.stdout + found.stderr
    (path,) = tmp_path.iterdir()
    rows = list(csv.DictReader(path.open()))
    assert {(r['op'], r['contender'], r['pass']) for r in rows} == {
        (op, contender, way)
        for op in ('glu', 'dwconv', 'mlp')
        for contender in ('ours', 'eager')
        for way in ('fwd', 'fwd+bwd')
    }
    assert all(float(r['ms']) > 0 and not r['note'] and 'CPU' in r['gpu'] for r in rows)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [((), 'torch sees no CUDA GPU'), (('--device', 'cpu'), 'times of a CPU are no benchmark')],
)
def test_times_of_a_cpu_are_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(sys, 'argv', ['ttt_glu.py', *arguments])
    assert benchmark.main() == 1
    assert message in capsys.readouterr().out


def test_every_stage_is_there():
    shapes = benchmark.shapes()
    assert len(shapes) == 2 * 5 * (3 + 2 * 4) + 5 * 3
    assert benchmark.Shape('glu', 'h-vit3-tiny', '1333x800', 2, 200, 334, 2, 32) in shapes
    assert benchmark.Shape('dwconv', 'vit3-base', '224x224', 128, 14, 14, 1, 64) in shapes
