"""The benchmark of ttt_linear and `make gpu`'s script, as far as a CPU can run them."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / 'tools' / 'dev' / 'kernel_benchmarks' / 'ttt_linear.py'
GPU_CHECK = ROOT / 'tools' / 'gpu_check.py'
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem + '_tool', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def benchmark():
    return load(BENCHMARK)


def run(*command, **options):
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, **options)


# Whether it runs is a matter of the rehearsal in `make test`; here torch compiles for real.
@pytest.mark.stress
def test_smoke_run_writes_a_table_that_says_it_is_one(tmp_path, benchmark):
    done = run(BENCHMARK, '--device', 'cpu', '--smoke', '--out', tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = tmp_path.glob('*.csv')
    assert table.name.startswith('ttt_linear_cpu_smoke')
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {row['gpu'].split(' (')[0] for row in rows} == {'CPU smoke'}
    assert {row['torch'] for row in rows} == {torch.__version__}
    found = {(r['what'], r['contender'], r['pass']) for r in rows if r['ms']}
    for contender in ('ours', 'eager', 'compiled', 'SDPA flash', 'SDPA cuDNN'):
        for way in ('fwd', 'fwd+bwd'):
            assert ('layer', contender, way) in found
    # Whatever has no time has a reason.
    assert all(row['ms'] or row['note'] for row in rows)


@without_gpu
def test_without_a_gpu_nothing_is_timed(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['ttt_linear.py'])
    assert benchmark.main() == 1
    assert 'no CUDA GPU' in capsys.readouterr().out
    monkeypatch.setattr(sys, 'argv', ['ttt_linear.py', '--device', 'cpu'])
    assert benchmark.main() == 1
    assert 'no benchmark' in capsys.readouterr().out


@pytest.mark.parametrize('tokens', [16, 25])
def test_the_eager_contender_computes_the_same_function(tokens, benchmark):
    device, shape = torch.device('cpu'), benchmark.Shape('layer', '', 2, 'T', tokens)
    results = []
    for contender in (benchmark.ours, benchmark.eager):
        torch.manual_seed(0)
        call, leaves = contender(shape, device)
        with torch.no_grad():
            # Constant steps and a fresh state would hide a mistake.
            leaves[3].copy_(torch.rand(leaves[3].shape) / 64)
            for x in leaves[4:]:
                x.add_(0.1 * torch.randn(x.shape))
        output = call().float()
        results.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    for x, y in zip(*results, strict=True):
        # bf16 products and LayerNorms in the one, fp32 in the other: some units of 2⁻⁸.
        assert (x.float() - y.float()).norm() < 0.04 * y.float().norm()


def test_the_slope_is_that_of_a_power_law(benchmark):
    rows = [
        {**benchmark.Shape('sweep', '', 1, 'S', n)._asdict(), 'contender': 'ours', 'pass': 'fwd'}
        for n in (1024, 4096, 16384, 65536)
    ]
    rows = [{**row, 'ms': 1e-4 * row['tokens'] ** 1.25} for row in rows]
    assert benchmark.slope(rows, 'fwd') == pytest.approx(1.25)
    assert benchmark.slope(rows, 'fwd+bwd') is None
    assert 'T^1.250' in benchmark.summary(rows)[-1]


@without_gpu
def test_gpu_check_says_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['gpu_check.py'])
    assert load(GPU_CHECK).main() == 1
    assert 'sees no CUDA GPU' in capsys.readouterr().out


def test_gpu_check_needs_nothing_installed(tmp_path):
    env = load(GPU_CHECK).environment(tmp_path)
    done = run('-c', 'import ttt_kernels; print(ttt_kernels.__file__)', env=env, cwd=tmp_path)
    assert done.stdout.startswith(str(tmp_path)), done.stderr
    assert 'TRITON_INTERPRET' not in env
    assert env.keys() >= os.environ.keys() - {'TRITON_INTERPRET'}


def test_gpu_check_names_the_rows_that_its_tests_settle(tmp_path, monkeypatch):
    name = 'test_output_and_every_gradient_agree_with_fp64'
    cases = {
        f'{name}[ttt_glu-0-torch.bfloat16]': '',
        f'{name}[ttt_glu-1-torch.bfloat16]': '',
        f'{name}[ttt_mlp, SwiGLU-0-torch.float16]': '<failure/>',
        f'{name}[ttt_mlp-1-torch.float16]': '',
        f'{name}[ttt_linear-0-torch.float32]': '<skipped/>',
        'test_any_batch[ttt_dwconv-3]': '',
    }
    rows = ''.join(f'<testcase name="{n}">{inside}</testcase>' for n, inside in cases.items())
    report = tmp_path / 'tests.xml'
    report.write_text(f'<testsuites><testsuite>{rows}</testsuite></testsuites>')
    triton = pytest.importorskip('triton')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (9, 0))
    where = f'settled: 9.0 (H100, H200), Triton {triton.__version__}'
    assert list(load(GPU_CHECK).settled(report)) == [
        f'{where}, ttt_glu, bf16: runs (2 of 2 cases agree with fp64)',
        f'{where}, ttt_mlp, fp16: refused, if that is a wrong result '
        '(1 of 2 cases agree with fp64)',
    ]


def test_gpu_check_begins_with_the_sanitizer_by_both_assemblers(tmp_path, monkeypatch):
    check = load(GPU_CHECK)
    for name, said in (
        ('compute-sanitizer', ''),
        ('ptxas', 'Cuda compilation tools, release 13.3'),
    ):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{said}, V1"\n')
        program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    monkeypatch.delenv('TRITON_PTXAS_PATH', raising=False)
    first, second = check.steps(tmp_path, False, tmp_path / 'x.xml')[:2]
    assert {first.part, second.part} == {'sanitizer'}
    assert first.under[0] == second.under[0] == str(tmp_path / 'compute-sanitizer')
    assert dict(first.env) == {'PYTORCH_NO_CUDA_MEMORY_CACHING': '1'}
    assert dict(second.env)['TRITON_PTXAS_PATH'] == str(tmp_path / 'ptxas')
    assert set(first.env) < set(second.env)
    (tmp_path / 'ptxas').write_text('#!/bin/sh\necho "release 12.8, V12.8.93"\n')
    assert check.newer_ptxas() != str(tmp_path / 'ptxas')
