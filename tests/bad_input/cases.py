"""Shared parts of the tests of bad input: runs of generated cases, and what a clear error is."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def run_cases(values: st.SearchStrategy, check: Callable[[Any], None], examples: int) -> None:
    """Calls `check` with up to so many generated values, the same in every run of the tests."""
    options = dict(derandomize=True, deadline=None, database=None, max_examples=examples)
    settings(**options, suppress_health_check=list(HealthCheck))(given(values)(check))()


def refused(call: Callable[[], Any], *words: str, kind: Any = (ValueError, TypeError)) -> None:
    """The call must end in an error of this kind whose sentence has all of these words."""
    with pytest.raises(kind) as error:
        call()
    # All arguments of errors that have several, such as an OSError.
    sentence = str(error.value)
    missing = [word for word in words if word not in sentence]
    assert not missing, f'{missing} not in: {type(error.value).__name__}: {sentence}'
