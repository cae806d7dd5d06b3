"""Errors that the tools print without a traceback."""

import pickle


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition('\n')[0]


class UsageError(ValueError):
    """A mistake in a command line or config."""


class DataError(ValueError):
    """The data of a config does not make sense."""


class MissingDataError(DataError, FileNotFoundError):
    """The data of a config is missing."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint hardly matches the module."""


class ResumeError(CheckpointError):
    """A training cannot be resumed from a checkpoint."""


class RefusedCheckpointError(CheckpointError, pickle.UnpicklingError):
    """A checkpoint has objects that are not on the allow-list."""
