"""The books of a training step: which module makes a tensor, and when it is freed again."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Tensors that the forward pass keeps for the backward pass, and those that neither keeps.
ACTIVATIONS, TRANSIENT = 'activations', 'transient'
GRADIENTS = 'gradients'
FORWARD, BACKWARD = 'forward', 'backward'


@dataclass(slots=True)
class Entry:
    """One storage; the views of it have no entries of their own.

    Attributes:
        nbytes: Its size.
        module: Full name of the innermost module that ran when it was made; in the backward pass
            the one that was recomputed, or else the one whose parameter got its gradient last.
        phase: Of the step, in which it was made.
        born, died: Times on the ledger's clock; None while it lives.
        kind: What it is, where that is known; see `Ledger.kind`.
    """

    nbytes: int
    module: str
    phase: str
    born: int
    died: int | None = None
    kind: str | None = None


class Ledger(TorchDispatchMode):
    """Writes down every storage that an operator returns, until it is freed.

    Sees the tensors that operators return, fake ones (of torch's FakeTensorMode) like real ones;
    not what a kernel allocates for itself, nor the rounding of an allocator.

    Args:
        model: Its modules give the names.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.starts: dict[str, int] = {}
        self._clock = 0
        self._phase = ''
        self._last_gradient = ''
        self._running: list[str] = []
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._open: dict[int, Entry] = {}
        self._watches: list[weakref.ref] = []
        self._handles: list[Any] = []

    def begin(self, phase: str) -> None:
        """From now on it is this phase of the step."""
        self._phase = phase
        self.starts[phase] = self._clock = self._clock + 1

    def hold(self, tensors: Iterable[Tensor], kind: str, module: str = '') -> None:
        """Enters tensors that are there already, or says of what kind they are."""
        for tensor in tensors:
            entry = self._enter(tensor)
            entry.kind = kind
            entry.module = module or entry.module

    def kind(self, entry: Entry) -> str:
        """Kind of a tensor: as it was named or as a gradient, else activation or transient.

        An activation is made in the forward pass and still there when the backward pass begins.
        """
        if entry.kind is not None:
            return entry.kind
        end = self.starts[BACKWARD]
        kept = entry.phase == FORWARD and (entry.died is None or entry.died > end)
        return ACTIVATIONS if kept else TRANSIENT

    def peak(self) -> tuple[int, Entry]:
        """The time from the forward pass on when the most is held, and what was made last then."""
        held = most = 0
        peak = None
        for time, nbytes, entry in self._changes():
            held += nbytes
            if time >= self.starts[FORWARD] and held > most:
                most, peak = held, (time, entry)
        if peak is None:
            raise RuntimeError('the ledger is empty: run a step inside of it')
        return peak

    def held(self, time: int) -> Iterator[Entry]:
        """Everything that is there at a time."""
        return (e for e in self.entries if e.born <= time and (e.died is None or e.died > time))

    def by_kind(self, time: int) -> Counter[str]:
        """Bytes that are there at a time, by kind."""
        totals: Counter[str] = Counter()
        for entry in self.held(time):
            totals[self.kind(entry)] += entry.nbytes
        return totals

    def by_module(self, kind: str, time: int) -> Counter[str]:
        """Bytes of one kind that are there at a time, by the module that made them."""
        totals: Counter[str] = Counter()
        for entry in self.held(time):
            if self.kind(entry) == kind:
                totals[entry.module] += entry.nbytes
        return totals

    def _changes(self) -> list[tuple[int, int, Entry]]:
        made = [(e.born, e.nbytes, e) for e in self.entries]
        freed = [(e.died, -e.nbytes, e) for e in self.entries if e.died is not None]
        return sorted(made + freed, key=lambda change: change[0])

    def __enter__(self) -> Ledger:
        self._handles = [
            register_module_forward_pre_hook(self._module_starts),
            # Always: recomputation leaves a module by an exception once it has what it needs.
            register_module_forward_hook(self._module_ends, always_call=True),
        ]
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(self._watch_gradient(name.rpartition('.')[0], parameter))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _module_starts(self, module: nn.Module, *_: Any) -> None:
        if module in self._names:
            self._running.append(self._names[module])

    def _module_ends(self, module: nn.Module, *_: Any) -> None:
        if module in self._names:
            self._running.pop()

    def _watch_gradient(self, name: str, parameter: nn.Parameter) -> Any:
        def arrived(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.hold([parameter.grad], GRADIENTS, name)
            self._last_gradient = name

        return parameter.register_post_accumulate_grad_hook(arrived)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._enter(leaf)
        return out

    def _enter(self, tensor: Tensor) -> Entry:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._open:
            return self._open[key]
        self._clock += 1
        module = self._running[-1] if self._running else ''
        if self._phase == BACKWARD:
            module = module or self._last_gradient
        entry = Entry(storage.nbytes(), module, self._phase, self._clock)
        self.entries.append(entry)
        self._open[key] = entry

        def freed(_: weakref.ref) -> None:
            self._clock += 1
            self._open.pop(key).died = self._clock

        self._watches.append(weakref.ref(storage, freed))
        return entry
