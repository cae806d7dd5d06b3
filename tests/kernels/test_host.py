"""Short ways of the host: around torch's dispatcher, Triton's binder, and repeated checks."""

import functools

import pytest
import torch
from kernel_testing import with_gradients
from ops import FP32, OPS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ttt_kernels import _dispatch, _inputs, ttt_glu

HW = (3, 5)


class Looks(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def dispatched(monkeypatch):
    """Names of the ops that were called by the dispatcher."""
    names = []
    call = torch.library.CustomOpDef.__call__

    def noted(op, *args, **kwargs):
        names.append(op._name)
        return call(op, *args, **kwargs)

    monkeypatch.setattr(torch.library.CustomOpDef, '__call__', noted)
    return names


@pytest.mark.parametrize('op', OPS.values(), ids=OPS)
def test_the_short_way_leads_to_the_same_bits(op, dispatched):
    inputs = op.make(HW, dtype=FP32)
    found = with_gradients(lambda x: op.call(x, HW), inputs)
    assert not dispatched
    with Looks():
        expected = with_gradients(lambda x: op.call(x, HW), inputs)
    assert dispatched == [op.name, f'{op.name}_backward']
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(x, expected[1][name]) for name, x in found[1].items())


def glu(**options):
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(2, 5, 1, 4, generator=generator, **options) for _ in range(3)]
    return *tokens, *[torch.randn(1, 4, 4, generator=generator, **options) for _ in range(2)]


class Wrapped(torch.Tensor):
    """A subclass that sees functions of torch."""


def flops(inputs):
    with FlopCounterMode(display=False) as counter:
        ttt_glu(*inputs)
    assert counter.get_total_flops() == 2 * 2 * 5 * 6 * 4 * 4


LOOK = {
    'a mode': flops,
    'a subclass': lambda inputs: ttt_glu(inputs[0].as_subclass(Wrapped), *inputs[1:]),
    'a tracer': lambda inputs: torch.jit.trace(lambda *x: ttt_glu(*x), inputs),
    'torch.func': lambda inputs: torch.func.vmap(ttt_glu)(*(x[None] for x in inputs)),
    'a lazy sign': lambda inputs: ttt_glu(torch._neg_view(inputs[0]), *inputs[1:]),
    'meta': lambda inputs: ttt_glu(*(x.to('meta') for x in inputs)),
    'torch.compile': lambda inputs: torch.compile(ttt_glu, backend='eager')(*inputs),
}


@pytest.mark.parametrize('look', LOOK)
def test_whatever_looks_at_ops_sees_them(look, dispatched):
    LOOK[look](glu())
    assert 'ttt_glu' in dispatched


def test_a_lazy_sign_is_not_forgotten():
    q, *others = glu()
    assert torch.equal(ttt_glu(torch._neg_view(q), *others), ttt_glu(-q, *others))


def test_a_second_derivative_stays_an_error():
    inputs = [x.requires_grad_() for x in glu()]
    (grad,) = torch.autograd.grad(ttt_glu(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match='autograd'):
        torch.autograd.grad(grad.sum(), inputs[1])


def test_inside_of_another_op_nothing_is_recorded(dispatched):
    inputs = [x.requires_grad_() for x in glu()]
    with torch._C._AutoDispatchBelowAutograd():
        assert not ttt_glu(*inputs).requires_grad
    assert dispatched


def test_an_op_without_a_derivative_raises_in_the_backward_pass():
    op = _dispatch.registered('no_derivative')(_plus_one)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match='autograd'):
        op(x).sum().backward()


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_check_that_has_passed_is_not_made_again():
    made = []

    def check(x, size):
        made.append((tuple(x.shape), x.dtype, size))
        if size == 3:
            raise ValueError('3')

    x = torch.ones(2, 3)
    for tensor in (x, x + 1, x.double(), x[:, :2]):
        _inputs.once(check, tensor, size=1)
        _inputs.once(check, tensor, size=True)
    assert len(made) == 6
    for _ in range(2):  # a failure is not remembered, nor what has no hash
        with pytest.raises(ValueError, match='3'):
            _inputs.once(check, x, size=3)
        _inputs.once(check, x, size=[1])
    assert len(made) == 10


# ----------------------------------------------------------------------------------------- launches


class NoGpu:
    """The device queries that Triton makes before a launch."""

    def get_current_target(self):
        return pytest.importorskip('triton.backends.compiler').GPUTarget('cuda', 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7


@pytest.fixture
def launched(monkeypatch):
    """Compiled kernels that were launched, and with what; nothing runs."""
    pytest.importorskip('triton')
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    found = []
    run = property(lambda kernel: lambda *with_: found.append((kernel, with_)))
    monkeypatch.setattr(driver, '_active', NoGpu(), raising=False)
    monkeypatch.setattr(CompiledKernel, 'run', run)
    monkeypatch.setattr(CompiledKernel, '_init_handles', lambda kernel: None)
    return found


def test_a_launch_that_is_known_is_the_same_launch(launched, monkeypatch):
    from triton.runtime.jit import JITFunction

    from ttt_kernels import _launch

    long = []
    run = JITFunction.run

    @functools.wraps(run)
    def counted(*args, **kwargs):
        long.append(args)
        return run(*args, **kwargs)

    monkeypatch.setattr(JITFunction, 'run', counted)
    monkeypatch.setattr(_launch, '_compiled', {})

    def launch(x, factor=2.0):
        total = torch.empty(2, 48, dtype=x.dtype)
        arguments = dict(partials=x, total=total, factor=factor, splits=3, size=48, divisor=1)
        arguments |= dict(ROWS=16, COLUMNS=64, num_warps=4)
        for _ in range(2):
            _launch.launcher(_launch._add_up, (2,))(**arguments)
        first, second = launched
        launched.clear()
        # The compiled kernel, its grid, stream and arguments; not what profilers are told.
        assert first[0] is second[0]
        pairs = list(zip(first[1], second[1], strict=True))
        assert all(x is y or x == y for x, y in pairs[:6] + pairs[7:])
        return second[0]

    x = torch.randn(2, 3, 48)
    aligned = launch(x)
    assert launch(x + 1) is aligned
    assert len(long) == 1
    # Pointers that are no multiples of 16, or another type, are compiled for.
    shifted = torch.randn(2 * 3 * 48 + 1)[1:].view(2, 3, 48)
    assert launch(shifted) is not aligned
    assert launch(x.double()) is not aligned
    assert launch(x, 3.0) is aligned
    assert len(long) == 4


def test_launches_that_are_looked_at_are_tritons(launched, monkeypatch):
    from triton.runtime.jit import JITFunction

    from ttt_kernels import _launch

    seen = []
    monkeypatch.setattr(JITFunction, 'run', lambda kernel, **_: seen.append(kernel))
    x = torch.randn(2, 3, 48)
    for _ in range(2):
        _launch.add_up(x)
    assert seen == [_launch._add_up] * 2
    assert not launched
