"""The ledger of a training step, against arithmetic by hand."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmvttt.analysis.memory.ledger import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    TRANSIENT,
    Ledger,
)

from .reduced import FLOAT


def books(model: nn.Module, *inputs: Tensor, run: Callable | None = None) -> Ledger:
    """The ledger of forward and backward of what a model returns, summed."""
    ledger = Ledger(model)
    ledger.hold([*model.parameters(), *model.buffers()], 'weights')
    ledger.hold(inputs, 'images')
    with ledger:
        ledger.begin(FORWARD)
        loss = (run or model)(*inputs).sum()
        ledger.begin(BACKWARD)
        loss.backward()
        ledger.begin('update')
    return ledger


def activations(ledger: Ledger) -> int:
    """Bytes of the activations when the backward pass begins, without the loss."""
    return ledger.by_kind(ledger.starts[BACKWARD])[ACTIVATIONS] - FLOAT


def test_a_chain_of_layers_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 2))
    ledger = books(model, torch.randn(5, 8))
    # ReLU's output, which LayerNorm saves again, its mean and deviation, and its own output. The
    # image, the weights, and what Linear returns are not among them.
    assert activations(ledger) == FLOAT * (5 * 16 + 5 + 5 + 5 * 16)
    assert ledger.by_module(ACTIVATIONS, ledger.starts[BACKWARD]) == {
        '1': FLOAT * 80,
        '2': FLOAT * 90,
        '': FLOAT,
    }
    held = ledger.by_kind(ledger.starts['update'])
    assert held['weights'] == held[GRADIENTS] == FLOAT * (8 * 16 + 16 + 16 + 16 + 16 * 2 + 2)
    assert held['images'] == FLOAT * 5 * 8


def test_views_are_not_counted_twice() -> None:
    def run(x: Tensor) -> Tensor:
        a, b = (x * scale).chunk(2)
        return (a * b).t().contiguous().view(-1)

    scale = nn.Parameter(torch.ones(()))
    x = torch.randn(6, 5)
    ledger = books(nn.ParameterList([scale]), x, run=run)
    # Both halves are saved by their product, and are one tensor; x is an image.
    assert activations(ledger) == FLOAT * 6 * 5


def test_a_checkpointed_block_keeps_its_input_only() -> None:
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    model = nn.ModuleDict(dict(first=nn.Linear(4, 8), block=block))
    x = torch.randn(3, 4)

    def plain(x: Tensor) -> Tensor:
        return model['block'](model['first'](x)) ** 2

    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(model['block'], model['first'](x), use_reentrant=False) ** 2

    # Both have the tensor that the square saves; inside, GELU saves its input and the Linear its.
    assert activations(books(model, x, run=plain)) == FLOAT * 3 * (8 + 32 + 32 + 8)
    ledger = books(model, x, run=recomputed)
    assert activations(ledger) == FLOAT * 3 * (8 + 8)
    made = [e for e in ledger.entries if e.phase == BACKWARD and ledger.kind(e) == TRANSIENT]
    again = [e for e in made if e.module.startswith('block')][:2]
    # The last Linear need not run again: nothing saves what it returns but the square.
    assert [(e.module, e.nbytes) for e in again] == [
        ('block.0', FLOAT * 3 * 32),
        ('block.1', FLOAT * 3 * 32),
    ]
    assert {e.died < ledger.starts['update'] for e in again} == {True}


def test_the_peak_is_where_most_is_held() -> None:
    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            wide = x.expand(100, -1).clone()
            wide = wide + 1
        return x * wide.sum(0)

    model = nn.Linear(1, 1)
    x = torch.randn(10, requires_grad=True)
    ledger = books(model, x, run=run)
    time, entry = ledger.peak()
    assert (entry.phase, entry.nbytes) == (FORWARD, FLOAT * 1000)
    # Two wide ones at once, the narrow one, and two weights.
    assert ledger.by_kind(time) == {
        'images': FLOAT * 10,
        'weights': FLOAT * 2,
        TRANSIENT: FLOAT * 2000,
    }
