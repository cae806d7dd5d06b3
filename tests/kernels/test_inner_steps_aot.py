"""The kernels of the inner steps, compiled for GPUs that need not be there.

A ratchet on registers, spills and shared memory, by Triton version:
tools/dev/kernel_benchmarks/aot/ttt_glu_aot.json, which
`python tools/dev/kernel_benchmarks/aot/ttt_glu_aot.py --update` writes.
"""

import json
import os

import pytest
import table
import triton
import ttt_glu_aot as aot

pytestmark = pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') == '1', reason='the interpreter compiles nothing'
)
TABLES = json.loads(aot.TABLE.read_text())
# Instruction sets and registers of a thread; shared memory of a block on sm_80, 89, 90.
SHARED = {'sm_80': 163 << 10, 'sm_89': 99 << 10, 'sm_90': 227 << 10}


@pytest.mark.parametrize('name', aot.variants(everything=False))
def test_compiled_kernels_get_no_worse(name):
    found = table.count(aot.build(name))
    # ptxas before 13.3 may overwrite the registers while WGMMA still reads them.
    assert found['wgmma_registers'] == 0
    assert found['shared'] <= SHARED[name.split('/')[-1]]
    if triton.__version__ in TABLES:
        worse = table.compare({name: found}, TABLES[triton.__version__])
        assert not [line for line in worse if line.startswith('+')]


@pytest.mark.parametrize('version', TABLES)
def test_the_table_has_every_variant_and_none_that_cannot_run(version):
    table = TABLES[version]
    assert set(table) == set(aot.variants(everything=True))
    for name, figures in table.items():
        assert figures['wgmma_registers'] == 0, name
        assert figures['shared'] <= SHARED[name.split('/')[-1]], name
        assert figures['spills'] == 0 or figures['registers'] > 128, name
        if name.endswith('sm_90') and '/fp32/' not in name:
            # Three sums over the tokens at d = 64 fill the registers: README.md of ttt_mlp.
            full = ('ttt_mlp' in name and '/64/' in name) or '/step_backward/' in name
            assert figures['spills'] == 0 or full, name


def test_versions_that_are_supported_have_a_table():
    assert {'3.6.0', '3.8.0'} <= TABLES.keys()
