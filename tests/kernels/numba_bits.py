"""Prints a hash of what every numba kernel computes: outputs and gradients of each op, in fp32.

Run by test_numba_kept.py, in processes that compile the kernels and in such that find them kept.
"""

import hashlib
import sys

import convolutions
import inner_steps
import sampling
import scans
import torch
from kernel_testing import with_gradients

OPTIONS = {'dtype': torch.float32}
CASES = {
    'ttt_linear': (scans.make(196, dim=64, **OPTIONS), scans.call),
    'causal_conv': (convolutions.make(196, 'fb', channels=96, **OPTIONS), convolutions.call),
    'ttt_glu': (inner_steps.make_glu((14, 14), dim=64, **OPTIONS), None),
    'ttt_dwconv': (inner_steps.make_dwconv((14, 14), dim=64, **OPTIONS), None),
    'deform_attn': (sampling.make(dim=32, **OPTIONS), sampling.call),
}


def bits(op: str) -> str:
    inputs, call = CASES[op]
    if call is None:
        step = getattr(inner_steps, op.replace('ttt', 'call'))
        found = with_gradients(lambda x: step(x, (14, 14), backend='numba'), inputs)
    else:
        found = with_gradients(lambda x: call(x, backend='numba'), inputs)
    numbers = [found[0], *found[1].values()]
    return hashlib.md5(b''.join(x.contiguous().numpy().tobytes() for x in numbers)).hexdigest()


if __name__ == '__main__':
    for op in sys.argv[1:] or CASES:
        print(op, bits(op))
