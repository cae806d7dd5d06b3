"""What a patch is: a small named repair of another package, that says what it did and why.

A patch can be left out by its name, before it is applied (the environment variable) and after (it
is taken back): docs/patches.md has the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from mmvttt_startup import SKIP, after_import

Repair = Callable[[], str | None]

_REPAIRS: dict[str, tuple[str, Repair]] = {}
_DONE: dict[str, Patch] = {}
# How to take each patch back; what `replace` and `on_undo` write to while a patch is applied.
_UNDO: dict[str, ExitStack] = {}
_current = ExitStack()


@dataclass(frozen=True)
class Patch:
    """The outcome of one patch.

    Attributes:
        name: The patch's name.
        why: What is broken without it.
        unneeded: Why nothing was done on this machine, or None where the patch was applied.
    """

    name: str
    why: str
    unneeded: str | None

    @property
    def applied(self) -> bool:
        """Whether something was changed."""
        return self.unneeded is None


def patch(name: str, why: str) -> Callable[[Repair], Repair]:
    """Registers a repair: a function that returns None once done, or a sentence why not needed.

    It changes other packages through `replace`, or says by `on_undo` how to take a change back.
    """

    def register(repair: Repair) -> Repair:
        _REPAIRS[name] = (why, repair)
        return repair

    return register


def replace(owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute of a module or class of another package, for as long as the patch lasts."""
    if attribute in vars(owner):
        _current.callback(setattr, owner, attribute, vars(owner)[attribute])
    else:
        _current.callback(delattr, owner, attribute)
    setattr(owner, attribute, value)


def on_undo(callback: Callable[..., Any], *args: Any) -> None:
    """Has something called when the patch that is being applied is taken back."""
    _current.callback(callback, *args)


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Has the patch that is being applied change a module once it is there, unless taken back."""
    undo = _current

    def change_now(module: ModuleType) -> None:
        global _current
        before, _current = _current, undo
        try:
            change(module)
        finally:
            _current = before

    finder = after_import(name, change_now)
    if finder is not None:

        def stop_waiting() -> None:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)

        undo.callback(stop_waiting)


def run_all(skip: Iterable[str] = ()) -> None:
    """Applies every patch but some; of these, takes back what has been applied.

    Args:
        skip: Names of patches, beside those in the environment variable.

    Raises:
        ValueError: There is no patch of such a name.
    """
    skip = {*skip, *_skipped_by_environment()}
    for name in sorted(skip - {*_REPAIRS, 'startup'}):
        close = get_close_matches(name, _REPAIRS, n=1)
        raise ValueError(
            f'mmvttt has no patch {name!r} to leave out (setup(skip=…), {SKIP})'
            f'{f"; did you mean {close[0]!r}?" if close else ""}; there are: {", ".join(_REPAIRS)}'
        )
    for name, (why, repair) in _REPAIRS.items():
        if name in skip:
            _UNDO.pop(name, ExitStack()).close()
            _DONE[name] = Patch(name, why, 'left out by its name')
        elif name not in _UNDO:
            _apply(name, why, repair)


def _apply(name: str, why: str, repair: Repair) -> None:
    global _current
    _current = ExitStack()
    _DONE[name] = Patch(name, why, repair())
    _UNDO[name] = _current


def _skipped_by_environment() -> list[str]:
    return [name for name in os.environ.get(SKIP, '').replace(' ', '').split(',') if name]


def patches() -> list[Patch]:
    """The patches that have run, in order."""
    return list(_DONE.values())
