"""What the tests of bad input share: runs of generated cases, their count, and what is clear."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Distinct generated cases that each file must have run when its last test comes.
LEAST = {
    'annotations': 200,
    'checkpoints': 220,
    'configs': 420,
    'files': 110,
    'images': 110,
    'odd training': 18,
    'ops': 380,
    'tools': 70,
}
# A case that takes so long hangs: the slowest takes about a second.
_HANG_S = 100


class Cases:
    """Runs cases and remembers them.

    Args:
        subject: A key of `LEAST`.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.ran: set[str] = set()

    def run(
        self, values: st.SearchStrategy, check: Callable[[Any], None], examples: int, what: str = ''
    ) -> None:
        """Calls `check` with generated values, the same in every run of the tests."""

        @settings(
            derandomize=True,
            deadline=None,
            database=None,
            max_examples=examples,
            suppress_health_check=list(HealthCheck),
        )
        @given(values)
        def run(value: Any) -> None:
            self.ran.add(f'{what} {value!r}')
            with _no_hang():
                check(value)

        run()

    def assert_enough(self) -> None:
        """For the last test of a file: as many distinct cases ran as the table says."""
        assert sum(LEAST.values()) >= 200
        assert len(self.ran) >= LEAST[self.subject], 'run the whole file'


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
    # Of errors with several arguments, such as those of the file system, all of them.
    sentence = str(error.value)
    missing = [word for word in words if word not in sentence]
    assert not missing, f'{missing} not in: {type(error.value).__name__}: {sentence}'


# What is given instead of an integer, a number, one of a few names, a dict.
not_ints = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.floats(),
    st.lists(st.integers(), max_size=2),
)
not_numbers = st.one_of(st.none(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
not_dicts = st.one_of(st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
not_sequences = st.one_of(st.none(), st.floats(), st.text(max_size=3))


def below(least: int) -> st.SearchStrategy:
    return st.integers(max_value=least - 1) | not_ints


def outside(least: int, most: int) -> st.SearchStrategy:
    return below(least) | st.integers(min_value=most + 1)


not_positive = (
    st.floats(max_value=0) | st.sampled_from([float('nan'), float('inf'), 0, -1]) | not_numbers
)
not_rates = (
    st.floats(max_value=-1e-3) | st.floats(min_value=1) | st.just(float('nan')) | not_numbers
)


def other_than(*allowed: Any) -> st.SearchStrategy:
    """Names (or something else) that are none of those allowed."""
    values = st.text(max_size=6) | not_ints | st.sampled_from([a + 's' for a in allowed if a])
    return values.filter(lambda value: value not in list(allowed))
