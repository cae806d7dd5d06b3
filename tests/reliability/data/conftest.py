"""Small sets without a fault, which a test may damage."""

from pathlib import Path

import pytest

from .sets import KINDS


def made(kind: str, folder: Path) -> Path:
    toolbox, make, _ = KINDS[kind]
    pytest.importorskip(toolbox)
    make(folder / kind)
    return folder / kind


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    return made('boxes', tmp_path)


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    return made('labels', tmp_path)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return made('folders', tmp_path)
