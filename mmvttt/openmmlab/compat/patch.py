"""A patch of another package."""

from typing import Any, NamedTuple


class Patch(NamedTuple):
    """A patch of another package. docs/patches.md has the fault without it.

    Applied by `repair`, a `module:function` of this folder, once the module `target` is imported.
    The function returns None, or why it is not needed.
    """

    name: str
    target: str
    repair: str


def replace(owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute of a module or class of another package."""
    setattr(owner, attribute, value)
