"""Kernels in numba compute the same bits in the process that compiles them and in all later ones.

A run that was killed and resumed ends as one that never was: the first process may have compiled
what the second one finds on the disk.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

numba = pytest.importorskip('numba', reason='numba is not installed')
HERE = Path(__file__).parent


# Prints a hash of the output and every gradient, in the dtypes and order of the arguments.
SCRIPT = """
import hashlib, sys, torch
from kernel_testing import with_gradients
from scans import call, make
for name in sys.argv[1:]:
    inputs = make(196, dim=64, dtype=getattr(torch, name))
    output, grads = with_gradients(lambda x: call(x, backend='numba'), inputs)
    arrays = [x.contiguous().view(torch.uint8).numpy().tobytes() for x in (output, *grads.values())]
    print(name, hashlib.md5(b''.join(arrays)).hexdigest())
"""


def run(cache: Path, *dtypes: str) -> dict[str, str]:
    environment = os.environ | {'NUMBA_CACHE_DIR': str(cache), 'OMP_NUM_THREADS': '2'}
    environment['PYTHONPATH'] = os.pathsep.join(filter(None, [str(HERE), *sys.path]))
    command = [sys.executable, '-c', SCRIPT, *dtypes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.stress
def test_compiled_or_kept_and_in_any_order(tmp_path):
    dtypes = ('float32', 'float64', 'bfloat16')
    fresh = run(tmp_path / 'a', *dtypes)
    assert len(list((tmp_path / 'a').rglob('*.nbc'))) >= 4
    assert run(tmp_path / 'a', *dtypes) == fresh
    assert run(tmp_path / 'a', *dtypes[::-1]) == fresh
    assert run(tmp_path / 'b', *dtypes[::-1]) == fresh


def test_inlined_functions_are_no_symbols_of_their_own():
    """The linker took the code of the part by itself where that was there, optimized otherwise."""
    from ttt_kernels import _numba

    # So large that LLVM does not inline it in a second place by itself.
    @_numba.inlined
    def sums(x):
        total = 0.0
        for i in range(len(x)):
            for j in range(i):
                total += np.exp(x[i] * x[j]) / (1 + np.sin(x[j]))
            for j in range(i, len(x)):
                total -= np.log(x[i] + x[j]) * np.cos(x[i])
            total += np.sqrt(x[i]) * np.tanh(total)
        return total

    @numba.njit(**_numba._OPTIONS)
    def caller(x, y):
        return sums(x) + sums(y) * sums(x[::2]) - sums(y[::2])

    array = numba.float32[::1]
    caller.compile((array, array))
    (code,) = caller.inspect_llvm().values()
    calls = [line for line in code.splitlines() if 'call' in line and 'sums' in line]
    assert not calls
