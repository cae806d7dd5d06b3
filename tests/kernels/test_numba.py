"""The numba kernels: threads, forks, products, rounding, and machine code that is kept on disk.

That they follow the definitions is in test_ops.py.
"""

import importlib.util
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from kernel_testing import error
from ops import OPS
from scans import OP, OP_BACKWARD, WAYS, call, make

from ttt_kernels import convolved_ttt_linear

numba = pytest.importorskip('numba', reason='numba is not installed')
caching = pytest.importorskip('numba.core.caching')
_numba = pytest.importorskip('ttt_kernels._numba')
kernel = pytest.importorskip('ttt_kernels.ttt_linear._numba')


@pytest.fixture
def threads(monkeypatch):
    """Sets the number of torch's threads, which work of any size is worth."""
    monkeypatch.setattr(_numba, '_WORTH_A_THREAD', 1)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def on_numba(inputs, **options):
    return call(inputs, backend='numba', **options)


def _call(part):
    """Compiles a call: an inlined function cannot be called from Python."""
    return numba.njit(lambda *args: part(*args))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_saved_is_the_references(dtype):
    """So one backend follows the other; the output is the same whether or not anything is saved."""
    # 20 channels: the kernels fill them up to 32.
    inputs, tolerance = make(37, dim=20, dtype=dtype).values(), OPS['ttt_linear'].tolerance[dtype]
    results = {way: OP(*inputs, 'fb', 16, 1e-6, way) for way in ('numba', 'reference')}
    for x, y in zip(*results.values(), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        assert error(x, y) < tolerance
    # Both round Z before they use it: their states, in fp32, are the same.
    for x, y in zip(*(kept[2:] for kept in results.values()), strict=True):
        assert error(x, y) < 2e-6
    for way, (o, *kept) in results.items():
        assert torch.equal(OP(*inputs, 'fb', 16, 1e-6, way, False)[0], o)
        grads = [
            OP_BACKWARD(torch.ones_like(o), *inputs, *kept, 'fb', 16, 1e-6, then)
            for then in results
        ]
        for x, y in zip(*grads, strict=True):
            assert error(x, y) < tolerance


def test_tokens_without_variance_and_without_an_epsilon():
    inputs = make(16, dim=16, dtype=torch.float32)
    inputs['b0'] = torch.zeros_like(inputs['b0'])
    for name in 'kq':
        inputs[name][:, 3] = 0
    torch.testing.assert_close(on_numba(inputs, eps=0.0), call(inputs, eps=0.0))


def test_a_failing_part_is_the_callers_error(threads):
    @numba.njit(nogil=True)
    def kernel(team, done):
        start, stop = _numba.spread(team, (done,))
        if start <= 3 < stop:
            raise IndexError('of part 3')
        done[start:stop] = 1

    for number in (1, 2):
        threads(number)
        done = np.zeros(8)
        with pytest.raises(IndexError, match='of part 3'):
            _numba.parallel(kernel, 8, 10**9, done)
        if number == 2:
            assert done.sum() == 7


def _in_a_fork(connection, inputs):
    torch.set_num_threads(1)  # as workers of a DataLoader do
    connection.send(float(on_numba(inputs).double().sum()))


def test_a_forked_worker_can_run_it(threads):
    # The parent has started a team of threads, which the fork does not have.
    threads(2)
    inputs = make(37, dtype=torch.float32)
    expected = float(on_numba(inputs).double().sum())
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context('fork')
    worker = context.Process(target=_in_a_fork, args=(theirs, inputs))
    worker.start()
    assert ours.poll(60)
    assert ours.recv() == expected
    worker.join(60)
    assert worker.exitcode == 0


def test_calls_at_once_with_teams_of_their_own(threads):
    # As in a server.
    inputs = make(117, batch=3, dim=16, dtype=torch.float32)

    def output(number):
        threads(number)
        return on_numba(inputs)

    expected = output(1)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(output, number) for number in 3 * (1, 2, 4, 8)]
        outputs = [call.result(timeout=60) for call in calls]
    assert all(torch.equal(x, expected) for x in outputs)


@pytest.mark.parametrize(('kind', 'bound'), [(np.float32, 1e-5), (np.float64, 1e-13)])
def test_products(kind, bound):
    call, random = _call(_numba.add_product), np.random.default_rng(0)
    for m, k, n in ((16, 16, 16), (32, 48, 80), (48, 272, 32)):
        x, w = random.normal(size=(m, k)).astype(kind), random.normal(size=(k, n)).astype(kind)
        # The left operand as it lies in memory, and as the transpose of one that does.
        for left in (x, np.ascontiguousarray(x.T).T):
            z = np.ones((m, n), kind)
            call(z, left, w)
            assert abs(z - 1 - x @ w).max() < bound * k


@pytest.mark.parametrize(('kind', 'bound'), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_filtered_rows(kind, bound):
    call, random = _call(_numba.add_filtered), np.random.default_rng(0)
    for m, taps, d in ((8, 1, 16), (16, 4, 48), (24, 13, 32)):
        x, y = (random.normal(size=(n, d)).astype(kind) for n in (m + taps - 1, taps))
        z = np.ones((m, d), kind)
        call(z, x, y)
        expected = 1 + sum(x[n : n + m] * y[n] for n in range(taps))
        assert abs(z - expected).max() < bound * taps


@pytest.mark.parametrize(('kind', 'bound'), [(np.float32, 4e-7), (np.float64, 1e-14)])
def test_sigmoids(kind, bound):
    call = _call(_numba.sigmoid)
    for x in (*np.linspace(-80, 80, 4001), 0.0, -1e-30, 200.0):
        exact = 1 / (1 + np.exp(-np.float64(kind(x))))
        assert abs(call(kind(x)) - exact) <= bound * exact, x
    assert call(kind(-1e30)) < 1e-37
    assert call(kind(np.inf)) == 1
    assert np.isnan(call(kind(np.nan)))


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ('tokens', 'batch', 'dim', 'ways', 'size', 'taps'),
    [
        (1, 3, 6, 'fb', 16, 4),
        (15, 1, 20, 'fb', 16, 4),
        (17, 3, 20, 'b', 5, 4),
        (63, 1, 33, 'fb', 2, 6),
        (196, 3, 64, 'bf', 16, 4),
        (196, 1, 16, 'f', 100, 1),
    ],
)
def test_convolutions_and_scan_in_one_pass(
    tokens, batch, dim, ways, size, taps, dtype, monkeypatch
):
    inputs = make(tokens, ways, size, batch, dim=dim, dtype=dtype)
    shared = inputs.pop('q').flatten(3)
    generator, channels = torch.Generator().manual_seed(1), 2 * dim
    weights = [
        (0.5 * torch.randn(len(ways), channels, taps, generator=generator, dtype=torch.float64)).to(
            inputs['w0'].dtype
        )
        for _ in 'qk'
    ]
    inputs.pop('k')
    options = dict(directions=tuple(WAYS[w] for w in ways), mini_batch_size=size)
    tensors = (shared, *weights, *inputs.values())
    exact = [x.double() for x in tensors]
    expected = convolved_ttt_linear(*exact, **options, backend='reference')
    one_pass = Mock(wraps=kernel.convolved)
    monkeypatch.setattr(kernel, 'convolved', one_pass)
    out = convolved_ttt_linear(*tensors, **options, backend='numba')
    assert (out.shape, out.dtype) == (inputs['v'].shape, dtype)
    assert error(out, expected) < OPS['ttt_linear'].tolerance[dtype]
    assert one_pass.call_count == 1
    with pytest.raises(ValueError, match='other'):
        convolved_ttt_linear(shared, weights[0], weights[1][..., :0], *tensors[3:], **options)


def test_convolutions_and_scan_with_gradients(monkeypatch):
    monkeypatch.delenv('TTT_KERNELS_BACKEND', raising=False)
    inputs = make(37, dtype=torch.float32)
    shared, weights = inputs.pop('q').flatten(3), torch.randn(2, 2, 12, 4)
    inputs.pop('k')
    leaves = [x.requires_grad_() for x in (shared, *weights.unbind(), *inputs.values())]
    grads = {}
    for backend in (None, 'reference'):
        out = convolved_ttt_linear(*leaves, backend=backend)
        grads[backend] = torch.autograd.grad(out.square().sum(), leaves)
    for x, y in zip(*grads.values(), strict=True):
        assert error(x, y) < 1e-4


def test_rounding_to_bf16_is_torchs():
    # Ties in both directions, numbers below the smallest normal one, infinity.
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x00000001, 0x80012345, 0x7F800000, 0xBF7FFFFF]
    x = np.array(bits, np.uint32).view(np.float32)
    expected = torch.from_numpy(x.copy()).bfloat16().float()
    _call(_numba.round_to_bf16)(x[None], 1, len(x))
    assert torch.equal(torch.from_numpy(x), expected)


def test_what_is_kept_on_disk_depends_on_every_part():
    from ttt_kernels.ttt_linear import _numba_kernels

    assert {'_numba.py', '_numba_kernels.py'} <= {name for name, *_ in _numba._STAMP}
    assert _numba_kernels.backward._cache._cache_file._source_stamp == _numba._STAMP


def test_mini_batches_that_are_too_large_for_it():
    large = make(1030, size=1025, heads=1)
    assert torch.equal(call(large, size=1025, backend=None), call(large, size=1025))
    with pytest.raises(RuntimeError, match='1025'):
        on_numba(large, size=1025)


def fresh(folder: Path) -> Callable:
    """The kernel of a new process: nothing of it is compiled, its cache is beside its source."""
    path = folder / 'source_of_a_kernel.py'
    if not path.exists():
        path.write_text('def double(x):\n    return x * 2\n')
    spec = importlib.util.spec_from_file_location('source_of_a_kernel', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _numba.jit(module.double)


@pytest.mark.parametrize('place', ['beside', 'user', 'nowhere'])
def test_machine_code_is_kept_where_something_can_be_written(tmp_path, monkeypatch, place):
    package, cache = tmp_path / 'package', tmp_path / 'cache'
    package.mkdir()
    # A file in the way of a folder: root may write into folders that others may not.
    if place != 'beside':
        (package / '__pycache__').touch()
    if place == 'nowhere':
        cache.touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(cache))
    assert fresh(package)(2.5) == 5.0
    folders = {'beside': {package}, 'user': {cache}, 'nowhere': set()}[place]
    assert {p for p in (package, cache) if list(p.rglob('*.nbc'))} == folders


def test_inlined_functions_are_no_symbols_of_their_own():
    """The linker took the code of the part by itself where that was there, optimized otherwise."""

    # So large that LLVM does not inline it in a second place by itself.
    @_numba.inlined
    def sums(x):
        total = 0.0
        for i in range(len(x)):
            for j in range(i):
                total += np.exp(x[i] * x[j]) / (1 + np.sin(x[j]))
            for j in range(i, len(x)):
                total -= np.log(x[i] + x[j]) * np.cos(x[i])
            total += np.sqrt(x[i]) * np.tanh(total)
        return total

    @numba.njit(**_numba._OPTIONS)
    def caller(x, y):
        return sums(x) + sums(y) * sums(x[::2]) - sums(y[::2])

    array = numba.float32[::1]
    caller.compile((array, array))
    (code,) = caller.inspect_llvm().values()
    calls = [line for line in code.splitlines() if 'call' in line and 'sums' in line]
    assert not calls


@pytest.mark.parametrize('damage', ['.nbc', '.nbi', 'a full disk'])
def test_a_cache_that_cannot_be_used(damage, tmp_path, monkeypatch) -> None:
    if damage == 'a full disk':
        full = Mock(side_effect=OSError(28, 'No space left on device'))
        monkeypatch.setattr(caching.IndexDataCacheFile, 'save', full)
    else:
        assert fresh(tmp_path)(3) == 6
        (cut,) = tmp_path.rglob(f'*{damage}')
        cut.write_bytes(cut.read_bytes()[:100])
    kernel = fresh(tmp_path)
    with pytest.warns(RuntimeWarning, match='NUMBA_CACHE_DIR'):
        assert kernel(3) == 6


def test_a_first_compilation_is_said(tmp_path, caplog) -> None:
    for lines in (1, 0):
        _numba._announce.cache_clear()
        caplog.clear()
        assert fresh(tmp_path)(3) == 6
        assert len(caplog.records) == lines
