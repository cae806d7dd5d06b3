"""A patch of another package, and its outcome."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """A patch of another package, and the fault without it (`why`).

    Applied by `repair`, a `module:function` of this folder, once the module `target` is imported.
    The function returns None, or why it is not needed.
    """

    name: str
    target: str
    repair: str
    why: str


@dataclass(frozen=True)
class Outcome:
    """State of a patch in this process: `unneeded` says why it is not, None if it was applied."""

    patch: Patch
    unneeded: str | None

    @property
    def applied(self) -> bool:
        """Whether something was changed."""
        return self.unneeded is None


def replace(owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute of a module or class of another package."""
    setattr(owner, attribute, value)
