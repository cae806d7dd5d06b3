"""Data sets with every kind of fault: each is found and named; what is right is left alone."""

import re
from pathlib import Path

import pytest
from mmengine.config import Config

from mmvttt.errors import DataError

from .faults import EVERY, RIGHT, THOROUGH, Make
from .sets import KINDS, check_annotations, check_data, config


def damaged(kind: str, make: Make, folder: Path) -> Config:
    """The config of a set with a fault."""
    toolbox, make_set, dataset = KINDS[kind]
    pytest.importorskip(toolbox)
    root = folder / kind
    make_set(root)
    cfg = config(dataset(root), toolbox, model=dict(head=dict(num_classes=3)))
    make(root, cfg)
    return cfg


@pytest.mark.parametrize(('kind', 'name'), [(k, n) for k in EVERY for n in EVERY[k]])
def test_every_fault_is_named(kind: str, name: str, tmp_path: Path) -> None:
    """By check_data.py, and before a training."""
    make, words, fatal = EVERY[kind][name]
    cfg = damaged(kind, make, tmp_path)
    (report,) = check_annotations(cfg, ('train',))
    assert re.search(words, str(report)), str(report)
    assert bool(report.errors) == fatal, str(report)
    if fatal and name not in THOROUGH:
        with pytest.raises(DataError):
            check_data(cfg)
    else:
        check_data(cfg)


@pytest.mark.parametrize(('kind', 'name'), [(k, n) for k in RIGHT for n in RIGHT[k]])
def test_what_is_right_is_left_alone(kind: str, name: str, tmp_path: Path) -> None:
    cfg = damaged(kind, RIGHT[kind][name], tmp_path)
    (report,) = check_annotations(cfg, ('train',))
    assert not report.errors + report.warnings
    check_data(cfg)
