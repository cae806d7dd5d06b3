"""Checks of arguments: every error names the argument, what was given, and what is allowed.

A wrong type is an `OptionTypeError`, a wrong value an `OptionError`: a `TypeError`, a `ValueError`.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from mmvttt.errors import OptionError, OptionTypeError, first_line


def check_int(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Checks an integer of at least `least`, and at most `most`. Booleans are not integers."""
    allowed = f'{least} or more' if most is None else f'{least} to {most}'
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionTypeError(f'{name}={value!r}: give an integer, {allowed}.')
    if value < least or (most is not None and value > most):
        raise OptionError(f'{name}={value!r}: give an integer, {allowed}.')


def check_ints(name: str, values: Any, least: int = 1, most: int | None = None) -> None:
    """Checks a list or tuple of integers."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise OptionTypeError(f'{name}={values!r}: give a list or tuple of integers.')
    for value in values:
        check_int(name, value, least, most)


def check_number(name: str, value: Any, above: float = -math.inf) -> None:
    """Checks a finite number above a bound."""
    allowed = 'a finite number' if above == -math.inf else f'a number above {above}'
    _check_real(name, value, allowed, lambda x: above < x < math.inf)


def check_rate(name: str, value: Any) -> None:
    """Checks a fraction in [0, 1)."""
    _check_real(name, value, 'a rate in [0, 1)', lambda x: 0 <= x < 1)


def check_part(name: str, value: Any) -> None:
    """Checks a fraction in [0, 1]."""
    _check_real(name, value, 'a fraction in [0, 1]', lambda x: 0 <= x <= 1)


def _check_real(name: str, value: Any, allowed: str, fits: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionTypeError(f'{name}={value!r}: give {allowed}.')
    if not fits(value):
        raise OptionError(f'{name}={value!r}: give {allowed}.')


def check_device(device: str) -> None:
    """Checks that torch can use a device here."""
    import torch

    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise OptionError(f"{device!r} is not there, give 'cpu': {first_line(error)}") from error


def check_choice(name: str, value: Any, choices: Collection) -> None:
    """Checks that a value is one of a few, all of which the error names."""
    # An unhashable value would fail in a dict look-up.
    if value not in list(choices):
        raise OptionError(f'{name}={value!r}: choose one of {", ".join(map(repr, choices))}.')


def check_backend(name: str, value: Any) -> None:
    """Checks the `backend` of an op of ttt_kernels, or None."""
    # Torch comes with it, and the tools name a missing file before they import torch.
    from ttt_kernels import BACKENDS

    check_choice(name, value, (None, *BACKENDS))


def check_config(name: str, value: Any, example: str) -> None:
    """Checks a dict."""
    if not isinstance(value, Mapping):
        raise OptionTypeError(f'{name}={value!r}: give a dict such as {example}.')


def checked_size(name: str, value: Any) -> tuple[int, int]:
    """(height, width) from one side or both."""
    pair = (value, value) if isinstance(value, Integral) else value
    check_ints(name, pair)
    if len(pair) != 2:
        raise OptionError(f'{name}={value!r}: give one side, or (height, width).')
    return int(pair[0]), int(pair[1])


def checked_head_dims(embed_dims: int, num_heads: int) -> int:
    """Checks that the heads divide the channels, and returns the channels of one."""
    check_int('embed_dims', embed_dims)
    check_int('num_heads', num_heads)
    if embed_dims % num_heads:
        raise OptionError(
            f'embed_dims={embed_dims} does not divide into num_heads={num_heads}: '
            'choose a number of heads that divides the channels.'
        )
    return embed_dims // num_heads
