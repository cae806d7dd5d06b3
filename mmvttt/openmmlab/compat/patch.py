"""A patch of another package."""

from collections.abc import Callable
from functools import wraps
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


def wrapping(owner: Any, attribute: str) -> Callable[[Callable[..., Any]], None]:
    """Decorates what takes the place of a function, and gets the original as its first argument."""
    original = getattr(owner, attribute)

    def decorate(function: Callable[..., Any]) -> None:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        replace(owner, attribute, call)

    return decorate
