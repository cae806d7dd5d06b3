"""Pickles that call functions, files with a config of yacs, and the bytes that torch saves."""

import copyreg
import io
import sys
import types
from pathlib import Path

import pytest
import torch


class Reduced:
    """Pickles as the call of a function, with a state for what it returns."""

    def __init__(self, function: object, *args: object, state: object = None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> tuple:
        return self.call

    def __call__(self) -> None:
        """The pickler wants the function of a call to be callable."""


class New(Reduced):
    """Pickles as the making of an object, past its `__init__`."""

    # The pickler wants an object of the class.
    __class__ = property(lambda self: self.call[1][0])

    def __init__(self, cls: type, *args: object, state: object = None) -> None:
        super().__init__(copyreg.__newobj__, cls, *args, state=state)


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def save_with_yacs(path: Path, patch: pytest.MonkeyPatch, **content: object) -> None:
    """Saves a content with a config of yacs, which need not be installed."""
    yacs = types.ModuleType('yacs.config')
    yacs.CfgNode = type('CfgNode', (dict,), {'__module__': 'yacs.config'})
    node = yacs.CfgNode(MODEL=yacs.CfgNode(NAME='vit3'), LR=4e-3)
    node.frozen = True
    with patch.context() as context:
        context.setitem(sys.modules, 'yacs', types.ModuleType('yacs'))
        context.setitem(sys.modules, 'yacs.config', yacs)
        torch.save(dict(content, config=node), path)
