"""Proxy fences before WGMMA and tcgen05, in the text of compiled kernels: aot/proxies.py."""

import json
import os

import proxies
import pytest
import torch

from ttt_kernels import _known

TABLES = json.loads(proxies.TABLE.read_text())
# A product follows a store of other bytes: the emulator, which looks at bytes, lets it pass.
OTHER_BYTES = {('3.7.1', '3.8.0'): ('ttt_mlp', 'ttt_mlp_swiglu')}
STORE, COPY = 'st.shared.b32 [%r1], %r2;', 'cp.async.cg.shared.global [%r1], [%rd1], 16;'
WAIT, FENCE = 'cp.async.wait_group 0;', 'fence.proxy.async.shared::cta;'
READS = (
    'wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r3, %r4}, %rd2, %rd3, 0, 1, 1, 0, 0;',
    '@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd2, %rd3, %r4, %p2;',
)


@pytest.mark.parametrize('read', READS)
@pytest.mark.parametrize(
    ('lines', 'copies', 'stores'),
    [
        ([STORE, FENCE, 'bar.sync 0;'], 0, 0),
        ([STORE, 'bar.sync 0;', FENCE], 0, 0),
        ([STORE, 'bar.sync 0;'], 0, 1),
        (['stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};'], 0, 1),
        ([COPY, WAIT, FENCE], 0, 0),
        ([COPY, FENCE, WAIT], 1, 0),
        ([COPY, FENCE], 0, 0),  # what is still on its way is read by nobody
        (['@%p3 bra $L1;', FENCE, '$L1:'], 0, 0),
        ([STORE, '@%p3 bra $L1;', FENCE, '$L1:'], 0, 1),
        ([STORE, FENCE, '$L1:', STORE, FENCE, '@%p3 bra $L1;'], 0, 0),
    ],
)
def test_every_way_to_a_product_needs_a_fence(lines, copies, stores, read):
    ptx = '\n'.join(['.visible .entry k()', '{', *lines, read, 'ret;', '}'])
    found = proxies.unfenced_reads(ptx)
    assert (found.reads, len(found.copies), len(found.stores)) == (1, copies, stores)


def test_the_last_round_of_a_loop_is_a_way_too():
    ptx = '\n'.join(['{', '$L1:', READS[0], STORE, '@%p3 bra $L1;', 'ret;', '}'])
    assert len(proxies.unfenced_reads(ptx).stores) == 1


def refused(name: str, version: str) -> bool:
    op, _, _, _, arch = name.split('/')
    op = 'ttt_mlp' if op.startswith('ttt_mlp') else op
    capability = divmod(int(arch.removeprefix('sm_')), 10)
    return _known.row(op, torch.bfloat16, capability, version).verdict == _known.REFUSED


@pytest.mark.parametrize('version', TABLES)
def test_no_kernel_that_runs_reads_copies_without_a_fence(version):
    table = TABLES[version]
    assert set(table) == set(proxies.variants())
    for name, found in table.items():
        if refused(name, version):
            continue
        assert found['copies'] == 0, name
        expected = [ops for versions, ops in OTHER_BYTES.items() if version in versions]
        op, kernel, *_, arch = name.split('/')
        other = any(op in ops for ops in expected) and kernel in ('step', 'step_backward')
        assert found['stores'] == 0 or (other and arch == 'sm_90'), name


def test_every_triton_in_range_has_been_walked():
    assert {'3.6.0', '3.7.1', '3.8.0', '3.9.0'} <= TABLES.keys()


@pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') == '1', reason='the interpreter compiles nothing'
)
@pytest.mark.parametrize('name', ['ttt_glu/read/bf16/64/sm_90', 'ttt_mlp/read/bf16/64/sm_100'])
def test_the_installed_triton_leaves_none(name):
    triton = pytest.importorskip('triton')
    if refused(name, triton.__version__):
        pytest.skip('refused there')
    found = proxies.walk(name)
    assert found['reads']
    assert not found['copies']
