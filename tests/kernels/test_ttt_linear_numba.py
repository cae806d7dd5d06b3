"""ttt_linear's numba kernels against the fp64 reference, and what holds on every CPU."""

import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
import torch
from kernel_testing import assert_same, error, with_gradients
from scans import NAMES, OP, OP_BACKWARD, call, make

from ttt_kernels import _backend

pytest.importorskip('numba', reason='numba is not installed')
# Sums in another order: as in the reference's own tests.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 2.5e-2,
}


def on_numba(inputs, ways='fb', size=16, **options):
    return call(inputs, ways, size, backend='numba', **options)


def _call(part):
    """A part is for other compiled functions alone."""
    import numba

    return numba.njit(lambda *args: part(*args))


def agrees(inputs, ways='fb', size=16, **options):
    exact = {n: x if x is None else x.double() for n, x in inputs.items()}
    expected = with_gradients(lambda x: call(x, ways, size, **options), exact)
    found = with_gradients(lambda x: on_numba(x, ways, size, **options), inputs)
    assert_same(found, expected, TOLERANCE[inputs['q'].dtype])
    assert found[0].dtype == inputs['q'].dtype
    assert all(g.dtype == inputs[n].dtype for n, g in found[1].items())


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize(
    ('tokens', 'size', 'dim', 'ways'),
    [(t, 16, 16, 'fb') for t in (1, 15, 16, 17, 63, 196)]
    + [(17, 1, 6, 'b'), (17, 4, 33, 'fb'), (17, 17, 64, 'bf'), (5, 40, 1, 'ffb')]
    # Past SEGMENT chunks the backward pass starts from states that the forward pass kept.
    + [(70, 1, 6, 'fb'), (258, 4, 16, 'b')],
)
def test_output_and_every_gradient_agree(tokens, size, dim, ways, dtype):
    heads = 3 if tokens < 63 else 1
    agrees(make(tokens, ways, size, heads=heads, dim=dim, dtype=dtype), ways, size)


@pytest.mark.parametrize('name', ['q', 'k', 'v', 'eta'])
def test_a_nan_stays_in_its_image(name):
    # Programs follow each other in the same buffers; sizes leave padding in both directions.
    inputs = make(21, batch=3, heads=2, dim=6, dtype=torch.float32)
    expected = with_gradients(on_numba, inputs)
    inputs[name] = inputs[name].clone()
    inputs[name][1] = torch.nan
    output, grads = with_gradients(on_numba, inputs)
    assert output[1].isnan().any()
    for image in (0, 2):
        assert torch.equal(output[image], expected[0][image])
        for token in ('q', 'k', 'v', 'eta'):
            assert torch.equal(grads[token][image], expected[1][token][image]), token


def test_no_token_scale_and_a_large_eps():
    agrees({**make(37), 'token_scale': None}, eps=0.3)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_what_is_saved_is_the_references(dtype):
    inputs = make(37, dim=16, dtype=dtype)
    found = OP(*inputs.values(), 'fb', 16, 1e-6, 'numba')
    for x, y in zip(found, OP(*inputs.values(), 'fb', 16, 1e-6, 'reference'), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        assert error(x, y) < TOLERANCE[dtype]


def test_strided_and_expanded_inputs():
    inputs = make(21, dtype=torch.float32)
    packed = torch.stack([inputs[n] for n in 'qkv'], dim=-1)
    strided = {**inputs, **dict(zip('qkv', packed.unbind(-1), strict=True))}
    strided['eta'] = inputs['eta'].transpose(1, 3).contiguous().transpose(1, 3)
    strided['w0'] = inputs['w0'].mT.contiguous().mT
    assert torch.equal(on_numba(strided), on_numba(inputs))
    one = inputs['k'][:, :1].expand_as(inputs['k'])
    agrees({**inputs, 'k': one})
    leaves = [x.requires_grad_() for x in strided.values()]
    output = on_numba(dict(zip(NAMES, leaves, strict=True)))
    dense = torch.ones_like(output)
    # The gradient of a sum: stride 0.
    found = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    for name, x, y in zip(NAMES, found, torch.autograd.grad(output, leaves, dense), strict=True):
        assert torch.equal(x, y), name


def test_an_empty_batch():
    output, grads = with_gradients(on_numba, make(5, batch=0, dtype=torch.float32))
    assert output.shape == (0, 5, 2, 2, 6)
    assert not any(g.any() for g in grads.values())


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_same_bits_with_any_number_of_threads(dtype, monkeypatch):
    monkeypatch.setattr('ttt_kernels._numba._WORTH_A_THREAD', 1)
    inputs = make(37, batch=3, heads=5, dim=32, dtype=dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7, 1):
            torch.set_num_threads(threads)
            found.append(with_gradients(on_numba, inputs))
    finally:
        torch.set_num_threads(before)
    for output, grads in found[1:]:
        assert torch.equal(output, found[0][0])
        assert all(torch.equal(g, found[0][1][n]) for n, g in grads.items())


def test_parameters_can_still_be_resized():
    # FSDP does so with what it has gathered; NumPy's views forbid it.
    inputs = make(21, dtype=torch.float32)
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    on_numba(leaves).sum().backward()
    parameters = [x for n, x in inputs.items() if n not in ('q', 'k', 'v', 'eta')]
    assert len(parameters) == 5
    assert all(x.untyped_storage().resizable() for x in parameters)


def test_a_failing_part_is_the_callers_error():
    from ttt_kernels import _numba

    def kernel(start, stop):
        if start <= 3 < stop:
            raise IndexError('of part 3')

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(IndexError, match='of part 3'):
            _numba.parallel(kernel, 8, 10**9)
    finally:
        torch.set_num_threads(before)


def _in_a_fork(connection, inputs):
    torch.set_num_threads(1)  # as workers of a DataLoader do
    connection.send(float(on_numba(inputs).double().sum()))


def test_a_forked_worker_can_run_it():
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


def test_no_output_depends_on_fresh_memory():
    inputs = make(21, dtype=torch.bfloat16)
    expected = with_gradients(on_numba, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = with_gradients(on_numba, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(found, expected, 1e-12)


@pytest.mark.parametrize(('kind', 'bound'), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize(('m', 'k', 'n'), [(4, 16, 16), (32, 48, 80), (16, 272, 32)])
def test_products(m, k, n, kind, bound):
    from ttt_kernels import _numba

    @_numba.inlined
    def product(z, x, w):
        _numba.add_product(z, x, w)

    random = np.random.default_rng(0)
    x, w = random.normal(size=(m, k)).astype(kind), random.normal(size=(k, n)).astype(kind)
    # Each operand as it lies in memory, and as the transpose of one that does.
    for left in (x, np.ascontiguousarray(x.T).T):
        for right in (w, np.ascontiguousarray(w.T).T):
            z = np.ones((m, n), kind)
            _call(product)(z, left, right)
            assert abs(z - 1 - x @ w).max() < bound * k


def test_rounding_to_bf16_is_torchs():
    from ttt_kernels import _numba

    @_numba.inlined
    def rounded(x):
        for i in range(len(x)):
            x[i] = _numba.rounded_to_bf16(x[i])

    # Ties in both directions, numbers below the smallest normal one, infinity.
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x00000001, 0x80012345, 0x7F800000, 0xBF7FFFFF]
    x = np.array(bits, np.uint32).view(np.float32)
    expected = torch.from_numpy(x.copy()).bfloat16().float()
    _call(rounded)(x)
    assert torch.equal(torch.from_numpy(x), expected)


def test_what_is_kept_on_disk_depends_on_every_part():
    from ttt_kernels import _numba
    from ttt_kernels.ttt_linear import _numba_backward

    names = {name for name, *_ in _numba._STAMP}
    assert {'_numba.py', '_numba_parts.py', '_numba_forward.py', '_numba_backward.py'} <= names
    assert _numba_backward.backward._cache._cache_file._source_stamp == _numba._STAMP


def test_opcheck():
    inputs, options = make(18, dtype=torch.float32), ('fb', 16, 1e-6, 'numba')
    outputs = OP(*inputs.values(), *options)
    torch.library.opcheck(
        OP_BACKWARD.default, (outputs[0] + 1, *inputs.values(), *outputs[1:], *options)
    )
    torch.library.opcheck(OP.default, (*(x.requires_grad_() for x in inputs.values()), *options))


def test_it_is_what_a_cpu_runs(monkeypatch):
    monkeypatch.delenv('TTT_KERNELS_BACKEND', raising=False)
    inputs = make(37, dtype=torch.float32)
    assert torch.equal(call(inputs, backend=None), on_numba(inputs))
    large = make(1030, size=1025, heads=1)
    assert torch.equal(call(large, size=1025, backend=None), call(large, size=1025))
    with pytest.raises(RuntimeError, match='must be at most 1024 for 1030 tokens, got 1025'):
        on_numba(large, size=1025)


def test_a_gpu_is_no_place_for_it():
    kernel = _backend.load_kernel('ttt_linear', 'numba')
    assert not isinstance(kernel, str)
    on_gpu = type('T', (), {'device': torch.device('cuda')})
    with pytest.raises(RuntimeError, match=r"backend='numba' cannot run here: .*on 'cuda'"):
        _backend.choose('ttt_linear', 'numba', on_gpu, lambda k: None)


def test_importing_the_kernels_does_not_import_numba():
    code = "import sys, ttt_kernels; print('numba' in sys.modules)"
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert run.stdout == 'False\n'


@pytest.mark.parametrize('place', ['beside', 'user', 'nowhere'])
def test_machine_code_is_kept_where_something_can_be_written(tmp_path, monkeypatch, place):
    from ttt_kernels import _numba

    package, cache = tmp_path / 'package', tmp_path / 'cache'
    package.mkdir()
    # A file in the way of a folder: root may write into folders that others may not.
    if place != 'beside':
        (package / '__pycache__').touch()
    if place == 'nowhere':
        cache.touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(cache))
    source = package / 'doubled.py'
    source.write_text('def double(x):\n    return 2 * x\n')
    scope = {'__name__': 'doubled'}
    exec(compile(source.read_text(), str(source), 'exec'), scope)
    kernel = _numba.jit(scope['double'])
    assert kernel(2.5) == 5.0
    folders = {'beside': {package}, 'user': {cache}, 'nowhere': set()}[place]
    assert {p for p in (package, cache) if list(p.rglob('*.nbc'))} == folders
