"""Small sets without a fault, which a test may damage and must put right again if it is shared."""

from pathlib import Path

import pytest

from .sets import make_coco, make_labels


@pytest.fixture(scope='module')
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip('mmdet')
    root = tmp_path_factory.mktemp('boxes') / 'set'
    make_coco(root)
    return root


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    pytest.importorskip('mmseg')
    make_labels(tmp_path / 'set')
    return tmp_path / 'set'
