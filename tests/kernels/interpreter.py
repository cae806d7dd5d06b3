"""Runs tests of Triton kernels in Triton's interpreter, in a process of its own and fast enough."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import triton.language as tl

INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'


def run_inside(path: str) -> None:
    """Runs a test file again with TRITON_INTERPRET, which Triton reads when it is imported."""
    run = subprocess.run(
        [sys.executable, '-m', 'pytest', '-x', '-p', 'no:cacheprovider', path],
        env={**os.environ, 'TRITON_INTERPRET': '1'},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert ' passed' in run.stdout.splitlines()[-1]


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
