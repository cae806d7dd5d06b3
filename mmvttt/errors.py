"""Errors that the tools print without a traceback."""

import pickle
from collections.abc import Collection
from difflib import get_close_matches


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition('\n')[0]


def suggest(name: str, names: Collection[str]) -> str:
    """The end of a message about an unknown name: `, did you mean 'x'?`, or nothing.

    A name that differs only by its scope (`mmvttt.X` and `X`) comes first.
    """
    bare = name.rpartition('.')[2]
    same = [other for other in names if other.rpartition('.')[2] == bare and other != name]
    close = same or get_close_matches(name, names, n=1) or get_close_matches(bare, names, n=1)
    return f', did you mean {close[0]!r}?' if close else ''


class UsageError(ValueError):
    """A mistake in a call, a config or a command line.

    Args:
        message: Names arguments as the function has them.
        arguments: Those that the message advises to change, for which a tool names its options.
    """

    def __init__(self, message: str = '', *arguments: str) -> None:
        super().__init__(message)
        self.arguments = arguments


class OptionError(UsageError):
    """An option of a function, class or config has a wrong value."""


class OptionTypeError(OptionError, TypeError):
    """An option has a value of a wrong type."""


class DataError(ValueError):
    """The data of a config does not make sense."""


class MissingDataError(DataError, FileNotFoundError):
    """The data of a config is missing."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """The checkpoint does not exist."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint hardly matches the module."""


class ResumeError(CheckpointError):
    """A training cannot be resumed from a checkpoint. `advice` names options of `mmvttt train`."""

    def __init__(self, problem: str, advice: str = '') -> None:
        super().__init__(f'{problem}; {advice}' if advice else problem)
        self.problem = problem


class RefusedCheckpointError(CheckpointError, pickle.UnpicklingError):
    """A checkpoint has objects that are not on the allow-list."""
