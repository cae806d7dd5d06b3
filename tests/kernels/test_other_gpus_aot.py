"""The kernels compiled for GPUs on which the project never ran: tools/dev/…/other_gpus_aot.py."""

import json
import os

import other_gpus_aot as aot
import pytest
import torch
from kernel_launches import compiled_for

from ttt_kernels import _launch

pytestmark = pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') == '1', reason='the interpreter compiles nothing'
)
# Shared memory of a program.
SHARED = {'sm_100': 227 << 10, 'sm_120': 99 << 10, 'gfx942': 64 << 10}
TABLES = json.loads(aot.TABLE.read_text())


@pytest.mark.parametrize('name', aot.variants(everything=False))
def test_kernels_compile_for_them_and_fit(name):
    found = aot.count_any(aot.build(name))
    assert found['shared'] <= SHARED[name.split('/')[0]]
    if 'gfx' in name and '/causal_conv' not in name:
        assert found['tensor_core']


@pytest.mark.parametrize('version', TABLES)
def test_the_table_has_every_variant_and_none_that_cannot_run(version):
    assert set(TABLES[version]) == set(aot.variants(everything=True))
    for name, figures in TABLES[version].items():
        assert figures['shared'] <= SHARED[name.split('/')[0]], name


def test_on_amd_large_tensors_get_a_kernel_of_their_own():
    """Triton's loads through 32-bit offsets are for tensors below 2 GiB, which it looks at."""
    compiled = []
    with compiled_for('gfx942', lambda kernel, found, *_: compiled.append(found)):
        for programs in (512, 8240):  # 0.13 GB and 2.16 GB
            _launch.add_up(torch.empty(programs, 2, 32768, device='meta'))
    small, large = compiled
    assert small.hash != large.hash
    ranges = [x.asm['ttir'].count('tt.pointer_range = 32') for x in compiled]
    assert ranges[0] == 2  # the partial sums and their total
    assert ranges[1] == 1  # the total, half of it
