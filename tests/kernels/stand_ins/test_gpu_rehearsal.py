"""`make gpu` rehearsed on a stand-in device: its tests, its benchmarks and their tables."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from ops import OPS

ROOT = Path(__file__).resolve().parents[3]
REHEARSAL = Path(__file__).with_name('rehearsal')
BENCHMARKS = str(ROOT / 'tools' / 'dev' / 'kernel_benchmarks')


def rehearse(*command: object) -> subprocess.CompletedProcess[str]:
    """Runs Python with the stand-in GPU in place from its start."""
    env = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    env |= {'PYTHONPATH': str(REHEARSAL), 'TTT_KERNELS_REHEARSAL': '1'}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=env, cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture(scope='module')
def checked(tmp_path_factory):
    """The folder and the output of a whole `make gpu` on tiny shapes."""
    out = tmp_path_factory.mktemp('gpu') / 'results'
    done = rehearse('tools/gpu_check.py', '--out', out, '--smoke')
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_everything_goes_to_out(checked):
    out, said = checked
    assert sorted(path.name for path in out.iterdir() if path.suffix != '.png') == [
        'blocks_stand_in_gpu.csv',
        'causal_conv_stand_in_gpu.csv',
        'deform_attn_stand_in_gpu.csv',
        'gpu_check.log',
        'models_inference.csv',
        'models_training.csv',
        'predicted_cycles_stand_in_gpu.csv',
        'ttt_glu_stand_in_gpu.csv',
        'ttt_linear_stand_in_gpu.csv',
    ]
    assert (out / 'gpu_check.log').read_text() == said
    for step in ('ttt_linear', 'causal_conv', 'ttt_glu', 'deform_attn', 'blocks', 'predict'):
        assert f'== benchmark {step}: ok after' in said
    for step in ('inference', 'training'):
        assert f'== models, {step}: ok after' in said
    assert '== tests: ok after' in said
    assert '== output of ttt_linear: ok after' in said
    assert 'T 64, 0.5 scans a multiprocessor: in the scan ' in said
    where = f'settled: 9.0 (H100, H200), Triton {triton.__version__}'
    settled = re.findall(rf'{re.escape(where)}, (\w+), bf16: runs \(', said)
    assert sorted(settled) == sorted({op.name for op in OPS.values()})
    # All of them ran, but for what needs two GPUs or has no kernel.
    assert 'failed' not in said
    skipped = [line for line in said.splitlines() if line.startswith('SKIPPED')]
    assert all('needs' in line or 'runs its reference' in line for line in skipped)


def test_every_contender_has_every_row(checked):
    out, _ = checked
    for name, contenders in {
        'ttt_linear': {'ours', 'ours, b 4', 'ours, b 64', 'SDPA flash', 'SDPA cuDNN', 'fla chunk',
                       'fla fused', 'eager', 'compiled'},
        'causal_conv': {'ours', 'eager'},
        'ttt_glu': {'ours', 'eager'},
        'blocks': {'ours', 'eager'},
        'deform_attn': {'ours', 'ours, two steps', 'grid sampling', 'grid sampling, compiled'},
    }.items():  # fmt: skip
        with (out / f'{name}_stand_in_gpu.csv').open() as file:
            rows = list(csv.DictReader(file))
        assert {(r['contender'], r['pass']) for r in rows} == {
            (contender, way) for contender in contenders for way in ('fwd', 'fwd+bwd')
        }
        # Replayed from a graph, without a remark.
        assert all(float(r['ms']) > 0 and not r['note'] for r in rows)
        assert {(r['gpu'], r['torch']) for r in rows} == {('Stand-in GPU', torch.__version__)}


def test_models_are_measured_with_and_without_a_graph(checked):
    out, _ = checked
    for name, ways in (('inference', ('', ' (CUDA graph)')), ('training', ('',))):
        with (out / f'models_{name}.csv').open() as file:
            rows = list(csv.DictReader(file))
        models = ('vit3_tiny_patch16_224', 'deit_tiny_patch16_224')
        assert [r['model'] for r in rows] == [model + way for model in models for way in ways]
        assert all(float(r['latency_ms']) > 0 and r['dtype'] == 'bfloat16' for r in rows)
        assert (out / f'models_{name}.png').exists()


def test_a_step_that_is_out_of_time_leaves_what_it_measured(tmp_path):
    script = tmp_path / 'late.py'
    script.write_text(
        f'import os, signal, sys\nsys.path.insert(0, {BENCHMARKS!r})\n'
        'import torch\nfrom timing import Table, ready, command_line\n'
        f'sys.argv += ["--smoke", "--out", {str(tmp_path)!r}]\n'
        'args = command_line("x").parse_args()\n'
        'device = ready(args)\n'
        f'from pathlib import Path\npath = Path({str(tmp_path)!r}) / "table.csv"\n'
        'with Table(path, ("contender", "ms"), device) as table:\n'
        '    table.add({"contender": "ours", "ms": 1})\n'
        '    os.kill(os.getpid(), signal.SIGTERM)\n'
        '    table.add({"contender": "eager", "ms": 1})\n'
        'sys.exit(table.status())\n'
    )
    done = rehearse(script)
    assert done.returncode == 1
    assert 'missing: what comes after this: interrupted' in done.stdout
    assert (tmp_path / 'table.csv').read_text().splitlines()[1:] == [
        f'Stand-in GPU,{torch.__version__},{triton.__version__},ours,1'
    ]


def test_every_kernel_is_predicted_and_measured(checked):
    out, _ = checked
    with (out / 'predicted_cycles_stand_in_gpu.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert {r['case'].split()[0] for r in rows} == {'ttt_linear', 'ttt_mlp', 'deform_attn'}
    assert all(float(r['ms']) > 0 for r in rows)
    predicted = {r['kernel'] for r in rows if r['predicted_ms']}
    assert all(float(r['predicted_ms']) > 0 for r in rows if r['predicted_ms'])
    # The others have no loop over tokens.
    assert predicted >= {
        'forward_scan', 'backward_query', 'backward_chain', 'backward_key', 'read',
        'read_backward', 'step', 'step_backward', 'backward_points', 'backward_value',
    }  # fmt: skip


# Calls that a GPU refuses and a CPU takes. The stand-in must refuse them too.
REFUSED = {
    'two devices': (
        'torch.autograd.grad((x * x).sum(-1), x, torch.ones(3, dtype=x.dtype))',
        'Expected all tensors to be on the same device',
    ),
    'a context twice': (
        'c = sdpa_kernel(SDPBackend.FLASH_ATTENTION)\nfor _ in range(2):\n    with c: pass',
        "generator didn't yield|object has no attribute 'args'",
    ),
    'fp32 in flash attention': (
        'with sdpa_kernel(SDPBackend.FLASH_ATTENTION):\n'
        '    F.scaled_dot_product_attention(*[torch.randn(1, 1, 8, 8, device="cuda")] * 3)',
        'No available kernel',
    ),
    'a wait in a graph': (
        'with torch.cuda.graph(torch.cuda.CUDAGraph()):\n    x.sum().item()',
        'not permitted when stream is capturing',
    ),
    'a time before its event': (
        'a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n'
        'a.record(); b.record(); a.elapsed_time(b)',
        'not waited for',
    ),
    'a ninth compilation': (
        'f = torch.compile(lambda x: x + 1)\nfor n in range(9): f(torch.zeros(n))',
        'recompile_limit',
    ),
    'dtypes that fla does not mix': (
        'import fla.ops.ttt\nt = x.bfloat16()\n'
        'fla.ops.ttt.chunk_ttt_linear(t, t, t, x, x, t, chunk_size=16, initial_state=x, '
        'initial_state_bias=x)',
        'must have the same dtype',
    ),
    'a generator of the CPU': (
        'torch.randn(3, device="cuda", generator=torch.Generator())',
        "Expected a 'cuda' device type for generator",
    ),
    'a NumPy array of the GPU': ('x.detach().numpy()', "can't convert cuda"),
}


def test_the_stand_in_refuses_what_a_gpu_refuses(tmp_path):
    script = tmp_path / 'refusals.py'
    script.write_text(
        'import re\nimport torch\nimport torch.nn.functional as F\n'
        'from torch.nn.attention import SDPBackend, sdpa_kernel\n'
        f'for name, (code, message) in {REFUSED!r}.items():\n'
        '    x = torch.randn(3, 4, device="cuda", requires_grad=True)\n'
        '    try:\n'
        '        exec(code)\n'
        '    except Exception as error:\n'
        '        assert re.search(message, str(error)), (name, error)\n'
        '    else:\n'
        '        raise AssertionError(name)\n'
        'print("all refused")\n'
    )
    done = rehearse(script)
    assert done.stdout == 'all refused\n', done.stderr


def test_a_kernel_is_told_from_its_reference(tmp_path):
    script = tmp_path / 'bits.py'
    script.write_text(
        'import torch\nfrom ttt_kernels import ttt_glu\n'
        'torch.manual_seed(0)\n'
        'x = [torch.randn(1, 9, 1, 32, device="cuda") for _ in range(3)]\n'
        'x += [torch.randn(1, 32, 32, device="cuda") for _ in range(2)]\n'
        'x = [y.requires_grad_() for y in x]\n'
        'found = {}\n'
        'for backend in (None, "triton", "reference"):\n'
        '    out = ttt_glu(*x, backend=backend)\n'
        '    found[backend] = out, *torch.autograd.grad(out, x, torch.ones_like(x[0]))\n'
        'for default, kernel, reference in zip(*found.values()):\n'
        '    assert torch.equal(default, kernel)\n'
        '    assert not torch.equal(kernel, reference)\n'
        '    torch.testing.assert_close(kernel, reference)\n'
        'print("told")\n'
    )
    done = rehearse(script)
    assert done.stdout == 'told\n', done.stderr


def test_a_missing_row_is_a_failure(tmp_path):
    script = tmp_path / 'missing.py'
    script.write_text(
        f'import sys\nsys.path.insert(0, {BENCHMARKS!r})\n'
        'import stand_in\nimport ttt_glu\n'
        'stand_in.Event.between = 30.0\n'  # too long for a graph
        'def broken(shape):\n    raise RuntimeError("no kernel image")\n'
        'ttt_glu.CONTENDERS["eager"] = broken\n'
        f'sys.argv = ["ttt_glu", "--smoke", "--op", "glu", "--out", {str(tmp_path)!r}]\n'
        'sys.exit(ttt_glu.main())\n'
    )
    done = rehearse(script)
    assert done.returncode == 1
    assert done.stdout.count('missing: ') == 2
    assert 'no kernel image' in done.stdout
