"""Shared parts of the tests of bad input: runs of generated cases, and what a clear error is."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# A case that takes so long hangs: the slowest takes about a second.
_HANG_S = 100


def run_cases(values: st.SearchStrategy, check: Callable[[Any], None], examples: int) -> None:
    """Calls `check` with up to so many generated values, the same in every run of the tests.

    At least half as many must be distinct: a strategy may have fewer to give, or repeat itself.
    """
    ran = set()

    @settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
    )
    @given(values)
    def run(value: Any) -> None:
        ran.add(repr(value))
        with _no_hang():
            check(value)

    run()
    assert 2 * len(ran) >= examples, f'{len(ran)} distinct cases: {sorted(ran)}'


@contextmanager
def _no_hang() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f'the case has taken {_HANG_S} s')

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(call: Callable[[], Any], *words: str, kind: Any = (ValueError, TypeError)) -> None:
    """The call must end in an error of this kind whose sentence has all of these words."""
    with pytest.raises(kind) as error:
        call()
    # All arguments of errors that have several, such as an OSError.
    sentence = str(error.value)
    missing = [word for word in words if word not in sentence]
    assert not missing, f'{missing} not in: {type(error.value).__name__}: {sentence}'
