"""Lets the tests of the kernels import the helper modules beside them, and the benchmarks."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parents[1] / 'tools' / 'dev' / 'kernel_benchmarks'
sys.path[:0] = [str(HERE), str(BENCHMARKS), str(BENCHMARKS / 'aot')]

from kernel_testing import quick_and_poisoned  # noqa: E402, F401
