"""What a patch is: a small named repair of another package, that says what it did and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_REPAIRS: list[tuple[str, str, Callable[[], str | None]]] = []
_DONE: dict[str, Patch] = {}


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


def patch(name: str, why: str) -> Callable[[Callable[[], str | None]], Callable[[], str | None]]:
    """Registers a repair: a function that returns None once done, or a sentence why not needed."""

    def register(repair: Callable[[], str | None]) -> Callable[[], str | None]:
        _REPAIRS.append((name, why, repair))
        return repair

    return register


def run_all() -> None:
    """Runs every registered repair that has not run in this process."""
    for name, why, repair in _REPAIRS:
        if name not in _DONE:
            _DONE[name] = Patch(name, why, repair())


def patches() -> list[Patch]:
    """The patches that have run, in order."""
    return list(_DONE.values())
