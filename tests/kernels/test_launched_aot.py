"""Kernels of deformable attention and of parts of blocks, compiled for GPUs that need not be there.

A ratchet on registers, spills and shared memory, by Triton version: the tables in
tools/dev/kernel_benchmarks/aot/, which deform_attn_aot.py and blocks_aot.py beside them write.
"""

import json
import os

import blocks_aot
import deform_attn_aot
import pytest
import table
import triton

pytestmark = pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') == '1', reason='the interpreter compiles nothing'
)
MODULES = (deform_attn_aot, blocks_aot)
TABLES = {aot: json.loads(aot.TABLE.read_text()) for aot in MODULES}


@pytest.mark.parametrize(('aot', 'name'), [(a, n) for a in MODULES for n in a.variants(False)])
def test_compiled_kernels_get_no_worse(aot, name):
    found = table.count(aot.build(name))
    if triton.__version__ in TABLES[aot]:
        worse = table.compare({name: found}, TABLES[aot][triton.__version__])
        assert not [line for line in worse if line.startswith('+')]


@pytest.mark.parametrize(('aot', 'version'), [(a, v) for a in MODULES for v in TABLES[a]])
def test_the_table_has_every_variant_and_none_that_spills(aot, version):
    found = TABLES[aot][version]
    assert set(found) == set(aot.variants(everything=True))
    for name, figures in found.items():
        # One store and one load, by ptxas 12.9 alone.
        assert figures['spills'] <= (2 if '/sm_120/' in name else 0), name
        # A block's share where four are on a multiprocessor of sm_80.
        assert figures['shared'] <= 40 << 10, name


@pytest.mark.parametrize('aot', MODULES)
def test_versions_that_are_supported_have_a_table(aot):
    assert {'3.6.0', '3.8.0'} <= TABLES[aot].keys()
