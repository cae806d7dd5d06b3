"""Decompositions of the ops into torch's own operators and `scan`, with symbolic sizes.

For `torch.export.ExportedProgram.run_decompositions`, and so for ONNX. Forward passes only.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ._backend import OPS


def decompositions() -> dict[Any, Callable]:
    """Decompositions of the forward pass of every op of this package, by overload."""
    references = {op: importlib.import_module(f'{__package__}.{op}.reference') for op in OPS}
    return {
        getattr(torch.ops.ttt_kernels, op).default: getattr(r, 'exported', _without_backend(r))
        for op, r in references.items()
    }


def _without_backend(reference: ModuleType) -> Callable:
    """A definition in operators that exporters know, as the op's implementation."""
    return lambda *arguments: reference.primal(*arguments[:-1])
