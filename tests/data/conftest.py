"""Small sets without a fault, which a test may damage."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .sets import KINDS


def _fixture(kind: str) -> Callable:
    @pytest.fixture(name=kind)
    def made(tmp_path: Path) -> Path:
        toolbox, make, _ = KINDS[kind]
        pytest.importorskip(toolbox)
        make(tmp_path / kind)
        return tmp_path / kind

    return made


boxes, labels, folders = map(_fixture, KINDS)
