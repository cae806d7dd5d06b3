"""Patches: small named repairs of other packages, applied once, each with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mmvttt_startup import SKIP, skipped

Repair = Callable[[], str | None]

_REPAIRS: dict[str, tuple[str, Repair]] = {}
_DONE: dict[str, Patch] = {}


@dataclass(frozen=True)
class Patch:
    """The outcome of one patch.

    Attributes:
        name: The patch's name.
        why: The fault without it.
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
    """Registers a repair: a function that returns None once done, or why nothing was done."""

    def register(repair: Repair) -> Repair:
        _REPAIRS[name] = (why, repair)
        return repair

    return register


def replace(owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute of a module or class of another package."""
    setattr(owner, attribute, value)


def apply_patches() -> None:
    """Applies every registered patch once, but for those in MMVTTT_SKIP_PATCHES.

    Raises:
        ValueError: There is no patch of a name in the variable.
    """
    skip = skipped()
    for name in sorted(skip - {*_REPAIRS, 'startup'}):
        close = get_close_matches(name, _REPAIRS, n=1)
        raise ValueError(
            f'{SKIP}={name}: mmvttt has no such patch to leave out'
            f'{f"; did you mean {close[0]!r}?" if close else ""}; there are: {", ".join(_REPAIRS)}'
        )
    for name, (why, repair) in _REPAIRS.items():
        if name not in _DONE:
            unneeded = f'left out by {SKIP}' if name in skip else repair()
            _DONE[name] = Patch(name, why, unneeded)


def patches() -> list[Patch]:
    """The patches that were applied or found unneeded, in order."""
    return list(_DONE.values())
