"""Python in a process of its own."""

import os
import subprocess
import sys


def python(
    code: str, *flags: str, stdin: str = '', **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a process of Python has printed, which has to end well."""
    done = subprocess.run(
        [sys.executable, *flags, '-c', code],
        input=stdin, capture_output=True, text=True, check=False,
        # Compiling the CPU's kernels would take longer than the rest.
        env=os.environ | {'TTT_KERNELS_BACKEND': 'reference'} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done
