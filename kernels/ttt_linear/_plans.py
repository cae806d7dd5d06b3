"""Where a TTT-linear scan is cut: `python tools/kernel_benchmarks/ttt_linear.py --tune` measures.

A scan is one chain of mini-batches and keeps one program busy; few scans leave most of a GPU idle.
Cut into segments, everything that does not sit on that chain runs on the idle part, for the price
of writing one state a segment and of reading tokens once more. The first row that fits decides.
"""

from typing import NamedTuple


class Plan(NamedTuple):
    """One row: for which calls, and the mini-batches of a segment (0: never cut)."""

    device: str  # part of the device's name, '' is any
    dim: int  # d, 0 is any
    scans_below: float  # B·R·H per multiprocessor
    tokens_from: int  # T
    forward: int
    backward: int


# Not measured yet: three programs fit a multiprocessor, and below that a cut costs no throughput.
PLANS = (
    Plan('', 0, 3.0, 256, forward=8, backward=8),
    Plan('', 0, float('inf'), 0, forward=0, backward=0),
)


def plan(device: str, dim: int, scans_per_sm: float, tokens: int) -> Plan:
    """The first row of `PLANS` that fits."""
    return next(
        row
        for row in PLANS
        if row.device in device
        and row.dim in (0, dim)
        and scans_per_sm < row.scans_below
        and tokens >= row.tokens_from
    )
