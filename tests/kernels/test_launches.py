"""Number of launches of an op on a GPU: with few tokens, launches cost more than their work.

Kernels of Triton and operations of torch that start one; none runs, a GPU need not be there.
"""

import importlib
import re

import pytest
import torch
from kernel_testing import with_gradients
from op_row import BF16
from ops import OPS
from torch.utils._python_dispatch import TorchDispatchMode

from ttt_kernels import _backend

pytest.importorskip('triton')
# They make or look at tensors and start nothing.
FREE = {'empty', 'view', 'alias', 'detach', 'select', 'slice', 'unbind', 'unsqueeze', 'squeeze'}
FREE |= {'transpose', 'permute', 'expand', 'as_strided', 'split', 'new_empty', 'empty_like'}
FREE |= {
    't',
    'chunk',
    'numpy_T',
    'split_with_sizes',
    '_unsafe_view',
    'empty_strided',
    'unflatten',
    'reshape',
    'mT',
    'promote_types',
    'view_as_real',
}
OUR_OPS = ('ttt_linear', 'causal_conv')


class Operations(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        as_it_was = name in ('to', 'contiguous') and result.data_ptr() == args[0].data_ptr()
        if name not in FREE and not as_it_was:
            self.names.append(name)
        return result


@pytest.fixture
def started(monkeypatch):
    """Kernels and operations started inside of ops, by op and pass; no kernel runs."""
    from triton.runtime.jit import JITFunction

    found: dict[tuple[str, str], list[str]] = {}
    names: list[str] = []

    def counted(op, which, function):
        def run(*args, **kwargs):
            names.clear()
            with Operations(names):
                result = function(*args, **kwargs)
            found[op, which] = list(names)
            return result

        return run

    for op in {row.name for row in OPS.values()}:
        module = importlib.import_module(f'ttt_kernels.{op}.kernel')
        for which in ('forward', 'backward'):
            monkeypatch.setattr(module, which, counted(op, which, getattr(module, which)))
    monkeypatch.setattr(JITFunction, 'run', lambda kernel, *_, **__: names.append(kernel.__name__))
    monkeypatch.setattr(_backend, '_unreachable', lambda *_: None)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (9, 0))
    return found


@pytest.mark.parametrize('name', OPS)
def test_forward_and_backward_start_no_more_than_they_did(name, started):
    op, hw = OPS[name], (5, 8)
    inputs = op.make(hw, dim=32, dtype=BF16)
    with_gradients(lambda x: op.call(x, hw, backend='triton'), inputs)
    found = tuple(len(started[op.name, which]) for which in ('forward', 'backward'))
    assert found == op.launches, started


def vittt_block():
    vittt = pytest.importorskip('mmvttt.models.backbones.vittt')
    block = vittt.VitttBlock(
        64,
        1,
        64,
        drop_path=0.1,
        mixer=dict(type='mmvttt.TTTLinearMixer', gate_cfg=vittt.GELU, backend='triton'),
    )

    def run(x):
        with torch.autocast('cpu', torch.bfloat16):
            return block(x, (4, 5))

    return block, run, torch.randn(2, 20, 64, requires_grad=True)


def inside(started, which):
    """Number of launches by the ops of a block in one pass."""
    return sum(len(names) for (_, found), names in started.items() if found == which)


def test_a_block_of_vittt_starts_no_more_than_it_did(started):
    block, run, x = vittt_block()
    block.eval()
    outside = {'forward': [], 'backward': []}
    with Operations(outside['forward']):
        y = run(x)
    grad = torch.ones_like(y)
    with Operations(outside['backward']):
        y.backward(grad)
    counts = {
        which: len([n for n in names if not n.startswith(OUR_OPS)]) + inside(started, which)
        for which, names in outside.items()
    }
    assert counts == {'forward': 42, 'backward': 69}, outside


@pytest.mark.stress  # compiles C++ for a minute
def test_torch_compile_fuses_most_of_what_a_block_starts(started):
    from torch._inductor.utils import run_and_get_code

    _, run, x = vittt_block()
    _, codes = run_and_get_code(lambda: torch.compile(run, dynamic=True)(x).sum().backward())
    # Code for a CPU: its own loops, products, and operations that it leaves alone.
    calls = re.compile(r'\b(?:cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.([\w.]+))\(')
    counts = {}
    for which, code in zip(('forward', 'backward'), codes, strict=True):
        found = [match[1] or '' for match in calls.finditer(code, code.index('def call('))]
        outside = [name for name in found if not name.startswith('ttt_kernels.')]
        counts[which] = len(outside) + inside(started, which)
    assert counts == {'forward': 18, 'backward': 39}
