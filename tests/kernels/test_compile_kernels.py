"""Every Triton kernel compiles for six GPUs, none of which need be there, and gets no worse.

The figures and the table are those of tools/dev/compile_kernels.py.
"""

import os

import compile_kernels
import pytest
import torch
import triton
from compile_kernels import GPUS, SHARED, VARIANTS, build, compiled_for, count, scan, table_of
from torch import Tensor
from torch.utils._pytree import tree_map_only
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from ttt_kernels import _launch

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(
        os.environ.get('TRITON_INTERPRET') == '1', reason='the interpreter compiles nothing'
    ),
]
COPY = 'cp.async.cg.shared.global [%r1], [%rd1], 16;'
WAIT, FENCE = 'cp.async.wait_group 0;', 'fence.proxy.async.shared::cta;'
PRODUCTS = (
    'wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16\n{%r3, %r4}, %rd2, %rd3, 0, 1, 1, 0, 0;',
    '@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd2, %rd3, %r4, %p2;',
)


@pytest.mark.parametrize('variant', VARIANTS)
def test_no_kernel_is_worse_than_the_table(variant):
    _, dtype, gpu = variant.split('/')
    actual = {f'{variant}/{name}': count(kernel) for name, kernel in build(variant).items()}
    table = table_of(triton.__version__)
    assert not compile_kernels.worse(actual, table)
    assert actual.keys() <= table.keys(), 'run python tools/dev/compile_kernels.py --update'
    with compiled_for(GPUS[gpu]):
        device = torch.device('cuda')
        refused = _launch.gpu('', compile_kernels.TYPES[dtype], device).miscompiled
    for name, figures in actual.items():
        assert figures['shared'] <= SHARED[gpu], name
        assert refused or not figures.get('unfenced'), name
        assert not figures.get('wgmma_registers'), name


def test_another_number_of_tokens_heads_or_images_compiles_nothing_new():
    first = None
    with compiled_for(90) as kernels:
        for tokens, images, heads in ((1, 1, 8), (50, 2, 8), (256, 3, 24)):
            call, inputs = scan(
                compile_kernels.TYPES['bf16'], 64, tokens=tokens, images=images, heads=heads
            )
            call(*inputs).sum().backward()
            hashes = {name: kernel.hash for name, kernel in kernels.items()}
            first = first or hashes
            assert hashes == first


@pytest.mark.parametrize('name', compile_kernels.CALLS)
def test_later_launches_pass_what_triton_would(name, monkeypatch):
    run, get, launched = JITFunction.run, CompiledKernel.__getitem__, []

    def launch(*arguments):
        # Stream, function and metadata of the launch come between.
        arguments = (*arguments[:3], *arguments[9:])
        layout = tree_map_only(Tensor, lambda x: (x.dtype, x.shape, x.stride()), arguments)
        launched.append(layout)

    with compiled_for(90), monkeypatch.context() as patch:
        patch.setattr(JITFunction, 'run', run)
        patch.setattr(CompiledKernel, '__getitem__', get)
        patch.setattr(CompiledKernel, '_init_handles', lambda self: None)
        patch.setattr(CompiledKernel, 'run', property(lambda self: launch))
        call, inputs = compile_kernels.CALLS[name](compile_kernels.TYPES['bf16'])
        call(*inputs).sum().backward()
        first = launched.copy()
        launched.clear()
        patch.setattr(JITFunction, 'run', None)
        call(*inputs).sum().backward()
    assert launched == first != []


@pytest.mark.parametrize('product', PRODUCTS)
@pytest.mark.parametrize(
    ('lines', 'unfenced'),
    [
        ([COPY, WAIT, FENCE], 0),
        ([COPY, WAIT, 'bar.sync 0;', FENCE], 0),
        ([COPY, WAIT, 'bar.sync 0;'], 1),
        ([COPY, FENCE, WAIT], 1),
        ([COPY, FENCE], 0),  # nothing waits for the copy, so nothing reads it
        (['@%p3 bra $L1;', FENCE, '$L1:'], 0),
        ([COPY, WAIT, '@%p3 bra $L1;', FENCE, '$L1:'], 1),
        ([COPY, WAIT, FENCE, '$L1:', COPY, WAIT, FENCE, '@%p3 bra $L1;'], 0),
    ],
)
def test_every_way_to_a_product_needs_a_fence(lines, unfenced, product):
    ptx = '\n'.join(['.visible .entry k(', '.param .u64 p', ')', '{', *lines, product, 'ret;', '}'])
    assert compile_kernels.unfenced_products(ptx) == unfenced


def test_a_later_round_of_a_loop_needs_a_fence_too():
    ptx = '\n'.join(['{', '$L1:', PRODUCTS[0], COPY, WAIT, '@%p3 bra $L1;', 'ret;', '}'])
    assert compile_kernels.unfenced_products(ptx) == 1


def test_a_larger_figure_is_worse():
    old = {'x': {'registers': 128, 'spilled': 4}}
    assert compile_kernels.worse({'x': {'registers': 130, 'spilled': 2}}, old) == [
        'x: registers 128 → 130'
    ]
    assert compile_kernels.worse(old, old) == []
    # Another assembler orders instructions in another way.
    old = {'x': {'instructions': 100, 'barriers': 2}}
    assert compile_kernels.worse({'x': {'instructions': 105, 'barriers': 2}}, old) == []
    assert len(compile_kernels.worse({'x': {'instructions': 106, 'barriers': 3}}, old)) == 2


def test_an_unknown_triton_has_the_newest_row(monkeypatch):
    rows = {'3.9.0': {'x': {}}, '3.10.0': {'y': {}}}
    monkeypatch.setattr(compile_kernels, 'tables', lambda: rows)
    for version, expected in (('3.9.0', '3.9.0'), ('3.8.1', '3.10.0'), ('4.0', '3.10.0')):
        assert table_of(version) is rows[expected]


def test_the_loop_that_is_counted():
    code = ['MOV R1, R2', 'BAR.SYNC 0x0', 'FADD R1, R2, R3', '@P0 BRA 0x0010', 'IADD R1, R1, 1']
    code += ['@!P1 BRA 0x0000', 'EXIT', 'BRA 0x0070']
    lines = [f'        /*{16 * i:04x}*/    {x} ;' for i, x in enumerate(code)]
    # From the barrier to the first branch; around it is another loop, at the end one of itself.
    assert compile_kernels.innermost_loop('\n'.join(lines)) == (3, 1)
