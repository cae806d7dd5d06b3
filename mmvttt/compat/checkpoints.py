"""Lets `torch.load(weights_only=True)` read mmengine's own checkpoints, and no more than that.

torch refuses, since 2.6, every class in a checkpoint that is not allowed by name. mmengine's
checkpoints hold `HistoryBuffer` (the log curves), its four statistics as `getattr(HistoryBuffer,
'mean')`, and NumPy arrays and scalars. None of the allowed names can run anything that the file
brings along: what stands in for `getattr` knows those four methods only.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint as mmengine_checkpoint

from .mend import mend

# The types of log values, counters and palettes.
_DTYPES = ('bool', 'uint8', 'int32', 'int64', 'float32', 'float64')
_STATISTICS = ('min', 'max', 'mean', 'current')


def statistic(owner: type, name: str) -> Callable:
    """What `getattr` means in a checkpoint: one of HistoryBuffer's statistics, nothing else."""
    if owner is not HistoryBuffer or name not in _STATISTICS:
        raise pickle.UnpicklingError(
            f'the checkpoint asks for the attribute {name!r} of {owner!r}; allowed: '
            f'{", ".join(_STATISTICS)} of HistoryBuffer'
        )
    return getattr(owner, name)


def allowed() -> list:
    """The allow-list, in the form of `torch.serialization.add_safe_globals`."""
    # np.ndarray.__reduce__ names the functions; numpy 2 renamed their module, files keep the old.
    reconstruct = np.zeros(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    numpy_names = [
        (function, f'numpy.{core}.multiarray.{name}')
        for core in ('core', '_core')
        for function, name in ((reconstruct, '_reconstruct'), (scalar, 'scalar'))
    ]
    statistics = [(statistic, f'{module}.getattr') for module in ('builtins', '__builtin__')]
    dtypes = [type(np.dtype(name)) for name in _DTYPES]
    return [HistoryBuffer, np.ndarray, np.dtype, *dtypes, *numpy_names, *statistics]


@mend('resume', "torch >= 2.6 refuses mmengine's HistoryBuffer and NumPy objects when resuming")
def allow_checkpoints() -> str | None:
    """Adds mmengine's types to torch's allow-list."""
    torch.serialization.add_safe_globals(allowed())
    return None


def load_safely(file: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """`torch.load` by the allow-list, whatever the caller asks for."""
    return torch.load(file, map_location=map_location, weights_only=True)


@mend('safe-resume', 'onedl-mmengine runs the code in a checkpoint that it cannot read safely')
def load_forks_safely() -> str | None:
    """Replaces the fork's loader, which also takes mmengine's types off torch's allow-list."""
    if not hasattr(mmengine_checkpoint, '_safe_torch_load'):
        return 'this mmengine has no such fallback'
    mmengine_checkpoint._safe_torch_load = load_safely
    return None
