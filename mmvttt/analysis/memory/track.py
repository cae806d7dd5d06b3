"""Tensors of a run by kind: torch's tracker, and its records in one form."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed._tools.mem_tracker import MemTracker, _ModState

GRADIENTS, ACTIVATIONS = 'gradients', 'activations'
# Names of the tracker's kinds, in the order in which they are shown.
KINDS = {
    'Parameter': 'parameters',
    'Buffer': 'buffers',
    'Optstate': 'optimizer',
    'Other': 'images, averaged copy',
    'Gradient': GRADIENTS,
    'Activation': ACTIVATIONS,
    'Temp': 'transient',
}
BEFORE, AFTER = _ModState.PRE_FW, _ModState.POST_FW


def by_kind(records: Any, when: str = 'current') -> Counter[str]:
    """Bytes by kind, summed over devices.

    Args:
        records: A `MemTracker`, or one of its snapshots.
        when: 'current' or 'peak', of a tracker.
    """
    snapshot = records.get_tracker_snapshot(when) if isinstance(records, MemTracker) else records
    totals: Counter[str] = Counter()
    for held in snapshot.values():
        for kind, nbytes in held.items():
            # The total has a string as its key.
            if name := KINDS.get(getattr(kind, 'value', '')):
                totals[name] += nbytes
    return totals
