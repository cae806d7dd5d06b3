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


def run(cache: Path, *ops: str) -> dict[str, str]:
    environment = os.environ | {'NUMBA_CACHE_DIR': str(cache), 'OMP_NUM_THREADS': '2'}
    environment['PYTHONPATH'] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(HERE / 'numba_bits.py'), *ops]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.stress
def test_compiled_or_kept_and_in_any_order(tmp_path):
    fresh = run(tmp_path / 'a')
    assert len(list((tmp_path / 'a').rglob('*.nbc'))) > len(fresh)
    assert run(tmp_path / 'a') == fresh
    backwards = list(reversed(fresh))
    assert run(tmp_path / 'a', *backwards) == fresh
    assert run(tmp_path / 'b', *backwards) == fresh


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
