"""Run lengths of COCO's masks, checked in Python: pycocotools makes a mask of any string."""

from __future__ import annotations

from typing import Any

_OFFSET, _MORE, _SIGN, _DATA = 48, 0x20, 0x10, 0x1F


def run_lengths(counts: Any) -> list[int] | None:
    """The run lengths of an RLE, uncompressed or as a string; None where they make no sense.

    In a string every number is written in digits of 5 bits, the lowest first, each one character:
    the digit, plus 32 where more follow, plus 48. The last digit has the sign. From the fourth
    number on, it is the difference from the second number before it.
    """
    if isinstance(counts, list):
        ints = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts)
        return counts if ints else None
    if isinstance(counts, str):
        counts = counts.encode('ascii', 'replace')
    if not isinstance(counts, bytes):
        return None
    runs: list[int] = []
    value = shift = 0
    for byte in counts:
        digit = byte - _OFFSET
        if not 0 <= digit < 2 * _MORE:
            return None
        value |= (digit & _DATA) << shift
        shift += 5
        if digit & _MORE:
            continue
        if digit & _SIGN:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    return None if shift or any(n < 0 for n in runs) else runs


def problem(mask: dict, size: tuple[int, int]) -> str | None:
    """The fault of an RLE of an image of `size` (height, width), as a plural, or None."""
    runs = run_lengths(mask.get('counts'))
    if mask.get('size') != list(size):
        return 'masks (RLE) of another size than the image'
    if runs is None or sum(runs) != size[0] * size[1]:
        return 'masks (RLE) whose run lengths do not add up to the image'
    return None
