"""The emulator itself: what a kernel must not do is found, and what it may is not."""

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from emulator import EmulationError, emulated, launch, machine, memory, program

THREADS = 128


@triton.jit
def _transpose(x, y, n, N: tl.constexpr):
    """y = xᵀ through shared memory, in steps of one block."""
    i = tl.arange(0, N)
    for block in range(n):
        start = block * N * N
        tile = tl.load(x + start + i[:, None] * N + i[None, :])
        # Two reductions over different axes need two layouts.
        tile = tile + tl.sum(tile, 1)[:, None] + tl.sum(tile, 0)[None, :]
        tl.store(y + start + i[None, :] * N + i[:, None], tile)


@triton.jit
def _masked(x, y, length, HOLE: tl.constexpr):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    inside = i < length + HOLE
    tl.store(y + i, tl.load(x + i, mask=inside, other=0.0), mask=i < length)


@triton.jit
def _product(x, y, o, N: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    product = tl.dot(tl.load(x + at), tl.load(y + at), input_precision=PRECISION)
    tl.store(o + at, product)


@triton.jit
def _products(x, y, o, n, N: tl.constexpr):
    """o = Σ tanh(x)·y of n pairs of matrices: one operand is stored, the other one copied."""
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    total = tl.zeros((N, N), tl.float32)
    for k in tl.range(0, n, num_stages=2):
        left, right = tl.load(x + k * N * N + at), tl.load(y + k * N * N + at)
        # Transposed, so that no operand is in registers.
        stored = tl.trans(tl.sigmoid(left.to(tl.float32)).to(right.dtype))
        total += tl.trans(tl.dot(tl.trans(right), stored))
    tl.store(o + at, total)


def transpose(change: Callable[[str], str] = str, arch: int = 90) -> tuple[torch.Tensor, ...]:
    """Input and output of `_transpose`, whose PTX was changed in between."""
    x = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.full_like(x, float('nan'))
    parse = program.parse
    with emulated(arch), mock.patch.object(launch, 'parse', lambda ptx: parse(change(ptx))):
        _transpose[(1,)](x, y, 3, N=32)
    return x, y


def without(pattern: str, which: int) -> Callable[[str], str]:
    """Leaves out one line of PTX that holds `pattern`."""

    def change(ptx: str) -> str:
        lines = ptx.splitlines()
        places = [i for i, line in enumerate(lines) if pattern in line]
        del lines[places[which]]
        return '\n'.join(lines)

    return change


def count(pattern: str) -> int:
    counts = []
    transpose(lambda ptx: counts.append(ptx.count(pattern)) or ptx)
    return counts[0]


@pytest.mark.parametrize('arch', [80, 90])
def test_a_correct_kernel_runs(arch):
    x, y = transpose(arch=arch)
    expected = (x + x.sum(2, keepdim=True) + x.sum(1, keepdim=True)).mT
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)


def test_every_barrier_that_is_removed_is_found():
    barriers = count('bar.sync')
    assert barriers >= 3
    for which in range(barriers):
        with pytest.raises(EmulationError, match=r'a race: .* with no barrier between'):
            transpose(without('bar.sync', which))


def products(change: Callable[[str], str] = str, late: bool = True) -> float:
    """The error of `_products`, whose PTX was changed."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 64, 64, generator=generator).bfloat16()
    o = torch.full((64, 64), float('nan'))
    parse = program.parse
    with (
        emulated(90, copies_land_late=late),
        mock.patch.object(launch, 'parse', lambda ptx: parse(change(ptx))),
    ):
        _products[(1,)](x, y, o, 3, N=64)
    expected = (x.float().sigmoid().bfloat16().double() @ y.double()).sum(0)
    return ((o - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize('late', [True, False])
def test_every_proxy_fence_that_is_removed_is_found(late):
    kept = []
    assert products(lambda ptx: kept.append(ptx) or ptx, late) < 1e-6
    assert 'cp.async' in kept[0]
    lines = kept[0].splitlines()
    fences = [i for i, line in enumerate(lines) if 'fence.proxy.async' in line]
    assert fences
    for i in fences:
        ptx = '\n'.join(lines[:i] + lines[i + 1 :])
        with pytest.raises(EmulationError, match='WGMMA reads what threads wrote, with no fence'):
            products(lambda _, ptx=ptx: ptx, late)


def test_shared_memory_that_nothing_wrote_is_found():
    with pytest.raises(EmulationError, match='shared memory is read before anything was written'):
        transpose(without('st.shared', 0))


@pytest.mark.parametrize('other', [0, 1], ids=['the same warp', 'another warp'])
def test_threads_that_write_different_values_at_once_are_found(other):
    shared, zeros = memory.SharedMemory(1, 16), np.zeros(2, np.int64)
    values = np.zeros((2, 4), np.uint8)
    shared.store(zeros, zeros, np.array([0, other]), values)
    # The last bit of a sum that lanes rounded differently.
    values[1] = 1
    with pytest.raises(memory.Fault, match='two threads write different values'):
        memory.SharedMemory(1, 16).store(zeros, zeros, np.array([0, other]), values)


def test_a_register_that_nothing_wrote_is_found():
    with pytest.raises(EmulationError, match=r'%\w+ is read before anything was written'):
        transpose(without('add.f32', 0))


def test_an_unread_half_may_be_undefined():
    """LLVM packs `{undefined, x}` and takes x out again."""

    def ptx(out: str, before: str = '') -> program.Program:
        return program.parse(
            '.visible .entry k(\n.param .u64 k_param_0\n)\n{\n'
            'ld.param.b64 %rd1, [k_param_0];\nmov.u16 %rs1, 7;\n' + before + '\n'
            'mov.b32 %r1, {%rs2, %rs1};\nmov.b32 {%rs3, %rs4}, %r1;\n'
            f'st.global.b16 [%rd1], {out};\nret;\n}}\n'
        )

    def run(code: program.Program) -> int:
        out = torch.zeros(8, dtype=torch.int16)
        tensors = memory.GlobalMemory([('out', out)])
        machine.Machine(
            code, {'k_param_0': out.data_ptr()}, np.zeros((1, 3), np.uint32), 32, 16, tensors, True
        ).run()
        return out[0].item()

    assert run(ptx('%rs4')) == 7
    # A kernel that reads it gets NaN, and what is written later is an error.
    assert run(ptx('%rs3')) == -1
    with pytest.raises(EmulationError, match=r'%rs2 is read before'):
        run(ptx('%rs4', before='bra $end;\nmov.u16 %rs2, 1;\n$end:'))


@pytest.mark.parametrize('length', [1, 63, 64, 100])
def test_masks_keep_a_kernel_in_bounds(length):
    x, y = torch.randn(length), torch.zeros(length)
    with emulated(90) as ran:
        _masked[(2,)](x, y, length, HOLE=0)
    assert torch.equal(x, y)
    assert ran == {'_masked': 2}


def test_an_access_out_of_bounds_is_found_and_named():
    x, y = torch.randn(100), torch.zeros(100)
    with (
        emulated(90),
        pytest.raises(
            EmulationError, match=r'out of bounds: 400 bytes into x, .* 400 .*ld\.global'
        ),
    ):
        _masked[(2,)](x, y, 100, HOLE=1)


@pytest.mark.parametrize('arch', [80, 90])
@pytest.mark.parametrize(
    ('dtype', 'precision', 'tolerance'),
    [
        # Products of rounded operands are exact in fp64 and summed there: one rounding to fp32.
        (torch.bfloat16, 'ieee', 1e-6),
        (torch.float16, 'ieee', 1e-6),
        # Ten bits of an operand.
        (torch.float32, 'tf32', 2e-3),
        (torch.float32, 'tf32x3', 1e-6),
    ],
    ids=str,
)
def test_matrix_products(arch, dtype, precision, tolerance):
    generator = torch.Generator().manual_seed(0)
    # 64 rows are WGMMA's on sm_90, which Triton takes for fp32 too: no kernel here has that.
    size = 32 if dtype == torch.float32 else 64
    x, y = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    o = torch.full((size, size), float('nan'))
    with emulated(arch):
        _product[(1,)](x, y, o, N=size, PRECISION=precision)
    expected = x.double() @ y.double()
    found = ((o - expected).abs().max() / expected.abs().max()).item()
    assert found < tolerance
    if precision == 'tf32':
        assert found > 1e-5


def test_bf16_is_rounded_to_nearest_even():
    from emulator.arithmetic import fp32_to_bf16

    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 10000, dtype=np.uint32)
    # Halves, which go to the even neighbour.
    bits[:1000] = bits[:1000] & 0xFFFF0000 | 0x8000
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy()
    assert (fp32_to_bf16(values).view(np.int16) == expected).all()
