"""The Triton kernels of ttt_linear compiled for sm_80 and sm_90, with or without a GPU.

A ratchet: registers, spills and shared memory may not exceed those of ttt_linear_aot.json. Where
they went below, or a change is worth its price, the tool writes the table anew:

    python tools/dev/kernel_benchmarks/aot/ttt_linear_aot.py --update
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from table import compare

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / 'tools' / 'dev' / 'kernel_benchmarks' / 'aot' / 'ttt_linear_aot.py'
UPDATE = f'run python {TOOL.relative_to(ROOT)} --update'


@pytest.fixture(scope='module')
def tool():
    spec = importlib.util.spec_from_file_location('ttt_linear_aot', TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module', params=['few', pytest.param('all', marks=pytest.mark.stress)])
def found(request, tmp_path_factory):
    """Figures of a compilation, in a separate process, because Triton is set up for the GPU there.

    Triton may take kernels from its cache, whose key has the source and the assembler.
    """
    everything = ['--all'] if request.param == 'all' else []
    out = tmp_path_factory.mktemp('aot') / 'found.json'
    env = {n: v for n, v in os.environ.items() if n not in ('TRITON_INTERPRET', 'DISABLE_MMA_V3')}
    env['TRITON_ALWAYS_COMPILE'] = '0'
    run = subprocess.run(
        [sys.executable, str(TOOL), '--out', str(out), *everything],
        env=env,
        capture_output=True,
        text=True,
    )
    assert out.exists(), run.stdout + run.stderr
    return json.loads(out.read_text())


def test_every_kernel_uses_tensor_cores_and_never_wgmma(found):
    # ptxas before 13.3 lets a WGMMA read registers that were given away; MMA has no such flaw.
    wrong = {n: f for n, f in found['found'].items() if f['wgmma'] or not f['tensor_core']}
    assert not wrong


def test_three_programs_fit_in_half_precision(found):
    for name, figures in found['found'].items():
        kernel, dtype, dim, _ = name.split('/')
        shared = kernel.startswith(('forward_fused', 'forward_output'))
        if shared and dtype != 'fp32' and dim != '128':
            # 65536 registers a multiprocessor, 128 threads a program.
            assert 3 * 128 * figures['registers'] <= 65536, name


def test_a_chain_that_is_alone_does_not_spill(found):
    for name, figures in found['found'].items():
        kernel, dtype, dim, arch = name.split('/')
        alone = kernel in ('forward_scan', 'forward_output', 'backward_chain')
        # It has no registers left: the table holds its spills.
        full = kernel == 'backward_chain' and dim == '128'
        if alone and not full and dtype != 'fp32' and arch == 'sm_90':
            assert figures['spills'] == 0, name


def test_nothing_got_worse_than_the_table(found, tool):
    table = json.loads(tool.TABLE.read_text()).get(found['triton'])
    if table is None:
        pytest.skip(f'no table for Triton {found["triton"]}; {UPDATE}')
    missing = found['found'].keys() - table.keys()
    assert not missing, f'not in the table: {missing}; {UPDATE}'
    changes = compare(found['found'], table)
    better = [line for line in changes if line.startswith('-')]
    if better:
        print('Better than the table:', *better, UPDATE, sep='\n')
    assert not [line for line in changes if line.startswith('+')], f'{UPDATE} if it is worth it'


def test_the_tables_cover_what_is_compiled_here(tool):
    tables = json.loads(tool.TABLE.read_text())
    assert {'3.6.0', '3.8.0'} <= tables.keys()
    every, some = (tool.variants(everything=e) for e in (True, False))
    for version, table in tables.items():
        assert set(some) <= set(table) <= set(every), version


def test_launches_bind_and_another_size_compiles_nothing_anew():
    env = {n: v for n, v in os.environ.items() if n != 'TRITON_INTERPRET'}
    script = Path(__file__).with_name('ttt_linear_launch.py')
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    # The scan is one kernel with its output, one with what is kept, one with both; and another one,
    # with more registers, where it has a multiprocessor to itself. So has the chain.
    assert json.loads(run.stdout.splitlines()[-1]) == {
        'forward_scan': 3 * 2,
        'forward_output': 1,
        'backward_query': 1,
        'backward_chain': 2,
        'backward_key': 1,
    }


def test_a_worse_figure_is_told_from_a_better_one(tool):
    old = {'registers': 128, 'spills': 4, 'shared': 0}
    new = {'registers': 130, 'spills': 2, 'shared': 0}
    assert compare({'x': new}, {'x': old}) == [
        '+ x: registers 128 → 130',
        '- x: spills 4 → 2',
    ]
    assert compare({'x': old}, {'x': old}) == []
