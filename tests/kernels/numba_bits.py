"""Prints a hash of what every numba kernel computes: outputs and gradients of each op, in fp32.

Run by test_numba_kept.py, in processes that compile the kernels and in such that find them kept.
"""

import hashlib
import sys

from kernel_testing import with_gradients
from op_row import FP32
from ops import OPS

from ttt_kernels import available

HW = (14, 14)


def bits(name: str) -> str:
    inputs = OPS[name].make(HW, dim=64, dtype=FP32)
    output, grads = with_gradients(OPS[name].call, inputs, HW, backend='numba')
    numbers = [output, *grads.values()]
    return hashlib.md5(b''.join(x.contiguous().numpy().tobytes() for x in numbers)).hexdigest()


if __name__ == '__main__':
    for name in sys.argv[1:] or [n for n in available() if available()[n]['numba'] is None]:
        print(name, bits(name))
