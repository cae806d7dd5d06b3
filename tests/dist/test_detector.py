"""Mask R-CNN with Vittt in its adapter on two ranks of DDP."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from mmvttt.openmmlab.datasets import make_digits

from .launch import kept, run_nodes

pytestmark = pytest.mark.stress
HERE = Path(__file__).parent


def test_detector(tmp_path: Path) -> None:
    digits = make_digits(tmp_path / 'digits', num_train=8, num_val=4, size=96)
    config, options = HERE / 'digits_config.py', ('--work-dir', str(tmp_path / 'run'))
    variables = {'DIGITS': str(digits)}
    (text,) = run_nodes(config, tmp_path, *options, nodes=1, variables=variables)
    ranks = kept(tmp_path / 'run', 2)
    # The weights are equal, bit for bit; each rank has statistics of its own.
    torch.testing.assert_close(ranks[1]['weights'], ranks[0]['weights'], rtol=0, atol=0)
    assert text.count('SyncBN needs a GPU: every process normalises on its own') >= 1
    seen = list(chain(*ranks[0]['seen'], *ranks[1]['seen']))
    assert len(seen) == len(set(seen)) == 8
    assert len(ranks[0]['weights']) > 200
    assert 'coco/segm_mAP' in text
