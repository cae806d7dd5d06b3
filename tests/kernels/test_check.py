"""A kernel's check of itself: what it sees, its process, and the verdicts that are kept."""

import json
import math
import os
import re
import shutil
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import emulation
import pytest
import torch
from op_row import BF16, FP16, FP32, Case
from ops import OPS, scan

from ttt_kernels import __main__, _backend, _check, _compare, _launch, _op

GPU = torch.device('cuda', 0)
CASES = {
    'ttt_linear': scan(63, dim=64, batch=9),
    **{n: Case((7, 9), {'dim': 64, 'batch': 9}) for n in OPS if n != 'ttt_linear'},
}


def arguments(name, case, dtype=BF16, change=lambda x: x):
    """The record of an op, and its arguments as it takes them, for a case of ops.py."""
    row = OPS[name]
    record, taken = _op.OPS[row.name], []

    def choose(args, backend):
        taken.append(args)
        return record.reference

    record.plans.clear()
    with mock.patch.object(record, 'choose', choose):
        inputs = row.make(case.hw, dtype=dtype, **case.sizes)
        inputs |= {n: change(inputs[n]) for n in row.tokens}
        row.call(inputs, case.hw, backend=None, **case.options)
    record.plans.clear()
    return record, taken[0]


# -------------------------------------------------------------------------------- what it looks at


@pytest.fixture
def hopper(monkeypatch):
    """The plans of an H100, of 132 multiprocessors."""
    from ttt_kernels.ttt_linear import kernel

    _launch.forget_plans()
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (9, 0))
    monkeypatch.setattr(kernel, '_multiprocessors', lambda device: 132)
    yield
    _launch.forget_plans()


def digest(record, args, batch=None):
    kernel = _backend.load_kernel(record.name)
    return _check.launches(record, kernel, args, batch or len(args[0]))


@pytest.mark.usefixtures('hopper')
@pytest.mark.parametrize('images', [1, 9, 140])
@pytest.mark.parametrize('name', OPS)
def test_some_images_are_launched_as_the_batch(name, images):
    case = scan(17, dim=32) if name == 'ttt_linear' else Case((3, 5), {'dim': 32})
    record, args = arguments(name, case._replace(sizes={**case.sizes, 'batch': images}))
    few = _check.some_images(record, args)
    assert len(few[0]) == min(images, 3)
    assert digest(record, args) == digest(record, few, images)
    if name == 'ttt_linear':  # many scans share a multiprocessor: another register build
        assert (digest(record, few) == digest(record, few, images)) is (images < 140)


@pytest.mark.usefixtures('hopper')
@pytest.mark.parametrize(
    ('images', 'tokens', 'shared', 'apart'),
    [(1, 196, 255, False), (2, 4200, 255, True), (140, 4200, 168, False)],
)
def test_the_builds_and_kernels_of_few_and_of_many_scans(images, tokens, shared, apart):
    from ttt_kernels.ttt_linear import kernel

    strides = ((tokens * 384, 384, 192, 64, 1),) * 3
    plan = kernel._plan((images, tokens, 2, 3, 64), strides, BF16, GPU, 'fb', 64, 16, True)
    assert {x.constants['APART'] for x in plan.forward_scan} == {plan.apart} == {apart}
    query, key, *others = plan.backward_query, plan.backward_key, plan.backward_chain
    assert {x.constants['maxnreg'] for x in (query, key)} == {255}
    assert {x.constants['maxnreg'] for x in (*others, *plan.forward_scan)} == {shared}


def wide(x):
    """Views of a packed projection of an odd width."""
    return torch.cat([x, x[..., :1]], -1)[..., :-1]


LONG = scan(4100, 'f', dim=64, batch=1, heads=1)
# Calls of other compiled kernels than usual, and by what a fault of these only would know them.
LAUNCHES = {
    'T > 4096': (LONG, None, lambda x, *_: x.q.shape[1] > 4096),
    'd = 128': (scan(63, dim=128), None, lambda x, *_: x.q.shape[-1] == 128),
    'padded width': (scan(63, dim=48), None, lambda x, *_: x.q.shape[-1] == 48),
    'no τ': (scan(63, dim=64, scale=False), None, lambda x, *_: x.token_scale is None),
    'strides': (scan(63, dim=64), wide, lambda x, *_: x.q.stride(1) % 16),
    'b = 4': (scan(63, size=4, dim=64), None, None),
    # More segments, and no second head.
    'T = 300': (scan(300, dim=64), None, None),
    'one head': (scan(63, dim=64, heads=1), None, None),
}


@pytest.mark.usefixtures('hopper')
@pytest.mark.parametrize('kind', LAUNCHES)
def test_another_compiled_kernel_is_checked_by_itself(kind):
    case, change, _ = LAUNCHES[kind]
    usual = arguments('ttt_linear', scan(63, dim=64))
    same = arguments('ttt_linear', scan(40, dim=64, heads=5))  # the same compiled kernels
    other = arguments('ttt_linear', case, BF16, change or (lambda x: x))
    half = arguments('ttt_linear', scan(63, dim=64), FP16)
    assert digest(*usual) == digest(*same)
    assert len({digest(*usual), digest(*other), digest(*half)}) == 3


def verdict(record, kernel, args):
    few = _check.some_images(record, args)
    return _compare.compare(record, kernel, [*map(_check.layout, few)], len(args[0]), 'cpu')


@pytest.mark.parametrize('factor', [1.05, math.nan])
@pytest.mark.parametrize('dtype', [FP32, BF16], ids=str)
@pytest.mark.parametrize('name', OPS)
def test_a_gradient_that_is_off_by_a_twentieth_is_seen(name, dtype, factor):
    record, args = arguments(name, CASES[name], dtype, wide if name == 'ttt_glu' else lambda x: x)
    right = emulation if name == 'ttt_linear' else record.reference
    assert verdict(record, right, args) == _check.AGREES
    index = next(i for i, n in enumerate(record.names) if n in ('k', 'x', 'value'))

    def backward(*arguments):
        grads = [*right.backward(*arguments)]
        grads[index] = grads[index] * factor
        return grads

    found = verdict(record, types.SimpleNamespace(forward=right.forward, backward=backward), args)
    assert found.startswith(f'the gradient of {record.names[index]} differs')


@pytest.mark.parametrize('dtype', [BF16, FP16], ids=str)
@pytest.mark.parametrize(('images', 'heads'), [(1, 3), (2, 3), (3, 3), (2, 6)])
def test_a_right_kernel_agrees_where_the_z_of_a_key_hardly_varies(images, heads, dtype):
    """Tokens of Vittt-T and -S at 224²: with two images of Vittt-T, one σ is tiny."""
    case = scan(196, dim=64, batch=images, heads=heads)
    record, args = arguments('ttt_linear', case, dtype)
    assert verdict(record, emulation, args) == _check.AGREES


@pytest.mark.parametrize('name', ['eta', 'token_scale'])
def test_a_gradient_of_small_differences_has_a_bound(name):
    record, args = arguments('ttt_linear', CASES['ttt_linear'], FP32)
    index = record.names.index(name)
    assert name in record.cancelling

    def backward(*arguments):
        grads = [*emulation.backward(*arguments)]
        grads[index] = grads[index] * 1.02
        return grads

    wrong = types.SimpleNamespace(forward=emulation.forward, backward=backward)
    assert verdict(record, wrong, args).startswith(f'the gradient of {name} differs')


class Faulty:
    """The emulated scan, with an output off by one in some calls."""

    backward = staticmethod(emulation.backward)

    def __init__(self, is_wrong):
        self.is_wrong = is_wrong

    def forward(self, args, keep=True):
        o, *kept = emulation.forward(args)
        if self.is_wrong(args, keep):
            o[-1, -1] += 1
        return o, *(x if keep else x[:0] for x in kept)


FAULTS = {n: x for n, x in LAUNCHES.items() if x[-1]} | {
    'none': (scan(63, dim=64), None, lambda *_: False),
    'three images': (scan(63, dim=64, batch=9), None, lambda x, *_: len(x.q) > 2),
    'inference': (scan(63, dim=64), None, lambda x, keep: not keep),
    'backward scan': (scan(63, 'b', dim=64), None, lambda x, _: x.directions == 'b'),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_of_some_launches_is_seen(fault, monkeypatch):
    case, change, is_wrong = FAULTS[fault]
    record, args = arguments('ttt_linear', case, BF16, change or (lambda x: x))
    found = verdict(record, Faulty(is_wrong), args)
    assert (found == _check.AGREES) is (fault == 'none'), found


def test_a_gradient_of_unusual_strides_is_copied():
    for shape, usual in (((2, 5, 64), True), ((2, 5, 63), False)):
        packed = torch.zeros(*shape[:-1], 2 * shape[-1])
        grad = packed[..., : shape[-1]]
        assert (_op._usual(grad).data_ptr() == grad.data_ptr()) is usual
    dense = torch.zeros(9)[1:]
    assert _op._usual(dense).data_ptr() % 16 == 0


# ------------------------------------------------------------------------------------ its process


@pytest.fixture
def request_of(monkeypatch):
    """The key and the request of a check in the interpreter, with its plain arguments."""
    record, args = arguments('causal_conv', Case((1, 5), {'dim': 16, 'batch': 1}), FP32)
    key = {'op': 'causal_conv', 'dtype': 'float32', 'launches': digest(record, args)}
    layouts = [*map(_check.layout, args)]
    return key, {'op': 'causal_conv', 'device': 'cpu', 'batch': 1, 'args': layouts}


@pytest.mark.interpreter
def test_a_wrong_kernel_is_found_and_no_code_of_the_working_directory_runs(
    request_of, tmp_path, monkeypatch
):
    for name in ('platform', 'argparse', 'json', 'torch', 'numpy', 'opt_einsum'):
        (tmp_path / f'{name}.py').write_text('open("ran", "w").close()\nraise SystemExit(0)\n')
    monkeypatch.setattr(sys, 'path', ['', str(tmp_path), *sys.path])
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    folder = tmp_path / 'of a user' / 'kernels'
    shutil.copytree(_check._FOLDER, folder)
    source = (folder / 'causal_conv' / 'kernel.py').read_text()
    wrong = source.replace('total += seen * w[tap]', 'total += 1.001 * seen * w[tap]')
    assert wrong != source
    (folder / 'causal_conv' / 'kernel.py').write_text(wrong)
    before = [_check.sources.__wrapped__(op) for op in ('causal_conv', 'ttt_glu')]
    monkeypatch.setattr(_check, '_FOLDER', folder)
    found, why = _check.ask(*request_of)
    assert re.match(r'the gradient of x differs from the reference by \d\.\de-04', found), why
    assert not list(tmp_path.rglob('ran'))
    # Another version of its sources is another verdict, but not of another op.
    after = [_check.sources.__wrapped__(op) for op in ('causal_conv', 'ttt_glu')]
    assert [x == y for x, y in zip(before, after, strict=True)] == [False, True]


# --------------------------------------------------------------------------------------- verdicts

ANSWER = """
import json, sys
request = json.load(sys.stdin)
print('a warning')
print(request['nonce'], 'these', {!r})
"""
CHILDREN = {
    'agrees': (ANSWER.format('agrees'), None, True),
    'differs': (ANSWER.format('result 0 differs by 1'), 'result 0 differs by 1; please', True),
    'an exit status is no answer': ('print("agrees")', 'status 0: agrees', False),
    'other launches': (ANSWER.replace('these', 'those').format('agrees'), 'are others', False),
    'crash': ('import os; os.abort()', 'status -6', False),
    'an error': ('raise MemoryError("no memory")', 'status 1: MemoryError: no memory', False),
    'a scheduler': ('import os; os.kill(os.getpid(), 15)', 'status -15', False),
    'hang': ('import time; time.sleep(600)', 'took more than 2 s', False),
}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU on which nothing has run; its checks run the code in the dict that this returns."""
    code = {'child': CHILDREN['agrees'][0]}
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.delenv(_check.VARIABLE, raising=False)
    key = {'op': 'causal_conv', 'dtype': 'bfloat16', 'gpu': 'a new GPU 13.0', 'triton': '4.0'}
    monkeypatch.setattr(
        _check, 'fingerprint', lambda *_: {**key, 'sources': code.get('sources', '1')}
    )
    monkeypatch.setattr(_check, 'launches', lambda *_: 'these')
    monkeypatch.setattr(_check, 'command', lambda: [sys.executable, '-c', code['child']])
    monkeypatch.setattr(_check, '_REASONS', {})
    return code


def reason(images=1):
    record = _op.OPS['causal_conv']
    tensors = [torch.zeros(images, 5, 1, 4, dtype=BF16)] * 4
    return _check.reason(record, None, record.arguments(*tensors))


def next_process():
    _check._REASONS.clear()


@pytest.mark.parametrize('name', CHILDREN)
def test_only_a_verdict_is_kept(gpu, name, monkeypatch, capfd):
    gpu['child'], message, kept = CHILDREN[name]
    if name == 'hang':
        monkeypatch.setattr(_check, 'LIMIT', 2.0)
    first = reason()
    assert (first is None) if message is None else (message in first)
    assert 'a new kind of causal_conv in bfloat16 on a new GPU' in capfd.readouterr().err
    assert reason() == first
    assert len(list(_check.verdicts())) == kept
    next_process()
    gpu['child'] = CHILDREN['agrees'][0]
    assert reason() == (first if kept else None)
    (line,) = [x for x in __main__.report().splitlines() if 'a new GPU 13.0' in x]
    assert line.endswith('differs by 1' if name == 'differs' else ': agrees')
    # Another check follows.
    gpu['child'] = CHILDREN['other launches'][0]
    assert __main__.main(['check', 'causal_conv']) == 0
    next_process()
    assert 'are others' in reason()


def test_without_space_nothing_is_kept(gpu, monkeypatch):
    full = mock.Mock(side_effect=OSError(28, 'No space left on device'))
    monkeypatch.setattr(_check.tempfile, 'NamedTemporaryFile', full)
    ask = mock.Mock(wraps=_check.ask)
    monkeypatch.setattr(_check, 'ask', ask)
    assert reason() is reason() is None
    assert ask.call_count == 1  # a process
    monkeypatch.setattr(_check.subprocess, 'run', full)
    next_process()
    assert 'could not run: [Errno 28] No space left' in reason()


def test_files_that_are_no_verdicts(gpu):
    assert reason() is None
    (path,) = _check.folder().glob('*.json')
    kept = json.loads(path.read_text())
    gpu['child'] = CHILDREN['differs'][0]
    odd = ({**kept, 'gpu': 'another'}, {**kept, 'verdict': 'passed'}, {**kept, 'time': None})
    for text in ('[]', '5', '{', *map(json.dumps, odd)):
        path.write_text(text)
        next_process()
        assert 'differs' in reason(), text
    path.unlink()
    os.mkfifo(path)
    next_process()
    assert 'differs' in reason()
    # A link is replaced, and not followed.
    target = path.with_name('of somebody')
    target.write_text('5')
    path.unlink()
    path.symlink_to(target)
    next_process()
    assert 'differs' in reason()
    assert target.read_text() == '5'
    assert not path.is_symlink()
    assert __main__.report().count('a new GPU') == 1


def test_other_sources_are_checked_again(gpu, monkeypatch):
    ask = mock.Mock(wraps=_check.ask)
    monkeypatch.setattr(_check, 'ask', ask)
    for sources in ('1', '2', '1'):
        gpu['sources'] = sources
        next_process()
        assert reason() is None
    assert ask.call_count == len(list(_check.verdicts())) == 2


def test_ranks_of_a_node_wait_for_one(gpu, monkeypatch, capfd):
    def slow(*_):
        time.sleep(0.5)
        return _check.AGREES, ''

    monkeypatch.setattr(_check, 'PATIENCE', 0.05)

    ask = mock.Mock(side_effect=slow)
    monkeypatch.setattr(_check, 'ask', ask)
    key, request = {**_check.fingerprint(), 'launches': 'these'}, {}
    # Threads of one process have locks of their own files, as processes do.
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda _: _check._first_reason(_check._path(key), key, request), range(3))
    assert list(found) == [None] * 3
    assert ask.call_count == 1
    assert capfd.readouterr().err.count('waits for the check') == 2


def test_a_variable_leaves_checks_out_and_so_does_an_empty_batch(gpu, monkeypatch):
    monkeypatch.setattr(_check, 'ask', None)
    assert reason(images=0) is None
    monkeypatch.setenv(_check.VARIABLE, '0')
    assert reason() is None


def test_a_fingerprint_says_everything(monkeypatch):
    properties = types.SimpleNamespace(name='a GPU', major=8, minor=6)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda _: properties)
    key = _check.fingerprint('ttt_glu', FP16, GPU)
    assert key.keys() > {'op', 'dtype', 'gpu', 'driver', 'ptxas', 'triton', 'torch', 'hip'}


def test_place_keeps_strides_and_alignment():
    x = torch.arange(24.0).view(2, 3, 4)
    for view in (x, x.mT, x[:, :1].expand(2, 3, 4), torch.arange(7.0)[1:].view(2, 3)):
        placed = _compare.place(view.clone(), _check.layout(view), torch.device('cpu'))
        assert torch.equal(placed, view)
        assert placed.stride() == view.stride()
        assert placed.data_ptr() % 16 == view.data_ptr() % 16
