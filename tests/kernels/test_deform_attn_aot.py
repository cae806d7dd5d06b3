"""The kernels of deformable attention, compiled for GPUs that need not be there.

A ratchet on registers, spills and shared memory, by Triton version:
tools/dev/kernel_benchmarks/aot/deform_attn_aot.json, which deform_attn_aot.py beside it writes.
"""

import json
import os

import deform_attn_aot as aot
import pytest
import table
import triton

pytestmark = pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') == '1', reason='the interpreter compiles nothing'
)
TABLES = json.loads(aot.TABLE.read_text())


@pytest.mark.parametrize('name', aot.variants(everything=False))
def test_compiled_kernels_get_no_worse(name):
    found = table.count(aot.build(name))
    if triton.__version__ in TABLES:
        worse = table.compare({name: found}, TABLES[triton.__version__])
        assert not [line for line in worse if line.startswith('+')]


@pytest.mark.parametrize('version', TABLES)
def test_the_table_has_every_variant_and_none_that_spills(version):
    assert set(TABLES[version]) == set(aot.variants(everything=True))
    for name, figures in TABLES[version].items():
        assert figures['spills'] == 0, name
        # A block's share where four are on a multiprocessor of sm_80.
        assert figures['shared'] <= 40 << 10, name


def test_versions_that_are_supported_have_a_table():
    assert {'3.6.0', '3.8.0'} <= TABLES.keys()
