"""Errors whose message is enough: the tools print it and end, without a traceback."""

import pickle


class UsageError(ValueError):
    """Something in a command line or config that its author can put right."""


class DataError(ValueError):
    """The data of a config cannot be what its author means."""


class MissingDataError(DataError, FileNotFoundError):
    """The data of a config is not where the config expects it."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint has next to nothing in common with the module it was given for."""


class ResumeError(CheckpointError):
    """A training cannot be resumed from a checkpoint."""


class RefusedCheckpointError(CheckpointError, pickle.UnpicklingError):
    """A checkpoint holds what is not on the allow-list."""
