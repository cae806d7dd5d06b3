"""A kernel's check of itself: right, wrong, crashing and hanging kernels, and its cache."""

import functools
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from ttt_kernels import __main__, _backend, _check, _compare
from ttt_kernels._op import OPS
from ttt_kernels.causal_conv import kernel

GPU = torch.device('cuda', 0)
# Runs the check of a kernel whose gradients are wrong, in Triton's interpreter.
WRONG = """
import os, sys
os.environ['TRITON_INTERPRET'] = '1'
from ttt_kernels import __main__
from ttt_kernels.causal_conv import kernel, reference
kernel.forward = reference.forward
kernel.backward = lambda *a: tuple(2 * x for x in reference.backward(*a))
sys.exit(__main__.main(['check', 'causal_conv', '--dtype', 'bf16']))
"""
CHILDREN = {
    'right': ('', None),
    'wrong': (
        WRONG,
        r'failed: causal_conv bf16: the gradient of x is off by 1\.0e\+00, at most 1\.0e-01',
    ),
    'crash': ('import os; os.abort()', r'crashed \(exit status -6\)'),
    'hang': ('import time; time.sleep(600)', r'took more than 2 s'),
}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU of which nothing is known, whose checks run the code in the dict that this returns."""
    code = {'child': ''}
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.delenv(_check.VARIABLE, raising=False)
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    key = {'op': 'causal_conv', 'dtype': 'bfloat16', 'gpu': 'a new GPU 13.0', 'triton': '4.0'}
    monkeypatch.setattr(_check, 'fingerprint', lambda *_: dict(key, kernels=code['child']))
    monkeypatch.setattr(_check, 'command', lambda *_: [sys.executable, '-c', code['child']])
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (13, 0))
    monkeypatch.setattr(_backend, '_no_launches', lambda: None)
    for cached in (_check.reason, _backend.known, _backend._warn_once):
        cached.cache_clear()
    yield code
    for cached in (_check.reason, _backend.known, _backend._warn_once):
        cached.cache_clear()


@pytest.mark.parametrize('name', CHILDREN)
def test_a_kernel_that_meets_a_new_gpu(gpu, name, monkeypatch, capfd):
    gpu['child'], message = CHILDREN[name]
    if name == 'hang':
        monkeypatch.setattr(_check, 'LIMIT', 2.0)
    if message is None:
        assert _backend._refused('causal_conv', torch.bfloat16, GPU) is None
    else:
        reason = _backend._refused('causal_conv', torch.bfloat16, GPU)
        assert re.search(f'its check {message}', reason), reason
        assert 'please report this with the output of' in reason
    assert (
        'causal_conv meets a new GPU 13.0 in bfloat16 for the first time' in capfd.readouterr().err
    )
    # The next process reads the verdict.
    _check.reason.cache_clear()
    monkeypatch.setattr(_check, 'command', lambda *_: pytest.fail('checked again'))
    again = _check.reason('causal_conv', torch.bfloat16, GPU)
    assert again == (None if message is None else reason)
    (line,) = [x for x in __main__.report().splitlines() if 'a new GPU 13.0' in x]
    assert line.endswith(again or 'checked 0.0 days ago: passed')


def verdict_of(code: int) -> list[str]:
    return [sys.executable, '-c', f'import sys; print("out of memory"); sys.exit({code})']


def test_what_could_not_be_checked_is_not_kept(gpu, monkeypatch):
    monkeypatch.setattr(_check, 'command', lambda *_: verdict_of(_check.NOT_CHECKED))
    reason = _check.reason('causal_conv', torch.bfloat16, GPU)
    assert reason == 'its check could not run: out of memory'
    assert not list(_check.verdicts())


def test_another_kernel_or_gpu_is_checked_again(gpu, monkeypatch):
    calls = []
    monkeypatch.setattr(_check, 'command', lambda *a: calls.append(a) or verdict_of(0))
    for child in ('', '# another', ''):
        gpu['child'] = child
        _check.reason.cache_clear()
        assert _check.reason('causal_conv', torch.bfloat16, GPU) is None
    assert len(calls) == len(list(_check.verdicts())) == 2


def test_without_a_cache_once_a_process(gpu, monkeypatch, tmp_path):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    calls = []
    monkeypatch.setattr(_check, 'command', lambda *a: calls.append(a) or verdict_of(1))
    for _ in range(2):
        assert 'failed: out of memory' in _check.reason('causal_conv', torch.bfloat16, GPU)
    assert len(calls) == 1


def test_ranks_of_a_node_wait_for_one(gpu, monkeypatch, tmp_path):
    ran = tmp_path / 'ran'
    code = f'import time; time.sleep(0.5); open({str(ran)!r}, "a").write("x")'
    monkeypatch.setattr(_check, 'command', lambda *_: [sys.executable, '-c', code])
    # Threads of one process have locks of their own files, as processes do.
    with ThreadPoolExecutor(3) as pool:
        ask = functools.partial(_check.reason.__wrapped__, 'causal_conv', torch.bfloat16, GPU)
        assert list(pool.map(lambda _: ask(), range(3))) == [None] * 3
    assert ran.read_text() == 'x'


def test_rows_that_are_known_and_a_variable_decide_without_a_check(gpu, monkeypatch):
    monkeypatch.setattr(_check, 'command', lambda *_: pytest.fail('checked'))
    monkeypatch.setenv(_check.VARIABLE, '0')
    assert _backend._refused('causal_conv', torch.bfloat16, GPU) is None
    monkeypatch.delenv(_check.VARIABLE)
    monkeypatch.setattr(_backend, 'triton_version', lambda: '3.6.0')
    for capability, refused in (((9, 0), False), ((7, 5), True)):
        _backend.known.cache_clear()
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_, c=capability: c)
        reason = _backend._refused('causal_conv', torch.bfloat16, GPU)
        assert (reason is not None) is refused


def test_a_fingerprint_says_everything(monkeypatch):
    properties = types.SimpleNamespace(name='a GPU', major=8, minor=6)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda _: properties)
    key = _check.fingerprint('ttt_glu', torch.float16, GPU)
    assert (key['op'], key['dtype'], key['gpu']) == ('ttt_glu', 'float16', 'a GPU 8.6')
    assert {'driver', 'ptxas', 'triton', 'torch', 'hip', 'kernels'} <= key.keys()
    assert all(isinstance(x, str) for x in key.values())


def test_a_kernel_that_raises_an_error_fails(monkeypatch, capsys):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setattr(kernel, 'forward', Mock(side_effect=RuntimeError('an illegal access')))
    assert _compare.main('causal_conv', ['bf16'], 'cuda') == _check.FAILED
    assert capsys.readouterr().out == 'causal_conv bf16: RuntimeError: an illegal access\n'


@pytest.mark.parametrize('name', OPS)
def test_examples_are_arguments_of_the_op(name):
    op = OPS[name]
    for exact in op.examples(_compare.Examples()):
        args = _compare._cast(op, exact, torch.float32)
        tokens = [x for n, x in zip(op.names, args, strict=True) if n in op.tokens]
        assert all(0.05 < x.std() < 0.5 for x in tokens)
        actual = _compare._results(op, op.reference, args)
        floats = [i for i in op.tensors if args[i] is not None]
        assert len(actual) >= 1 + len(floats)
        assert all(x.isfinite().all() for x in actual.values())
