"""Chooses whether a scan writes its output (tools/dev/kernel_benchmarks/ttt_linear.py --tune).

A scan is one chain of mini-batches and keeps one program busy; few scans leave most of a GPU idle.
A kernel of its own then writes the output, segment by segment, on the idle part, for the price of
writing G and a state a segment and of reading tokens once more. The first row that fits decides.
"""

from typing import NamedTuple


class Plan(NamedTuple):
    """One row: for which calls, and whether the output is apart from the scan."""

    device: str  # part of the device's name, '' is any
    dim: int  # d, 0 is any
    scans_below: float  # B·R·H per multiprocessor
    tokens_from: int  # T
    apart: bool


# Predicted, not measured, for b = 16; tests/kernels/test_predicted_cycles.py holds them to the
# predictions. With more scans, or fewer tokens (they have to be several segments), the kernel apart
# takes longer than what it saves in the chain.
PLANS = (
    Plan('', 128, 0.7, 768, apart=True),
    Plan('', 128, float('inf'), 0, apart=False),
    Plan('', 0, 1.4, 768, apart=True),
    Plan('', 0, float('inf'), 0, apart=False),
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
