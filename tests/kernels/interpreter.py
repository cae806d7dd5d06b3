"""Makes Triton's interpreter fast enough for the tests that are marked `interpreter`."""

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import triton.language as tl

INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'


@contextlib.contextmanager
def patched_once(*modules: ModuleType) -> Iterator[None]:
    """Has the interpreter patch Triton's language once a launch, not at every function call."""
    from triton.runtime.interpreter import InterpretedFunction

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, '__call__', lambda f, *a, **k: f.rewrite()(*a, **k))
        for module in modules:
            # A launch patches the modules that it finds here; Triton's own functions use this one.
            patch.setattr(module, 'core', tl.core, raising=False)
        yield
