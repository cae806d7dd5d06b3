"""Processes of their own, and Python in one."""

import os
import subprocess
import sys
from typing import Any

Ended = subprocess.CompletedProcess[str]


def run(*command: object, **options: Any) -> Ended:
    """The status of a command and what it has printed."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **options)


def python(code: str, *flags: str, stdin: str = '', **environment: str) -> Ended:
    """What a process of Python has printed, which has to end well."""
    # Compiling the CPU's kernels would take longer than the rest.
    env = os.environ | {'TTT_KERNELS_BACKEND': 'reference'} | environment
    done = run(sys.executable, *flags, '-c', code, input=stdin, env=env)
    assert done.returncode == 0, done.stderr
    return done
