"""A patch of another package, and its outcome."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """A patch of another package.

    Attributes:
        name: Its name, e.g. in MMVTTT_SKIP_PATCHES.
        target: The module to change; the patch is applied once it is imported.
        repair: `module:function` of this folder that applies it; returns None, or why it is not
            needed.
        why: The fault without it.
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
