"""Checkpoints that are damaged or of something else: an error, or the right weights."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.errors import CheckpointError
from mmvttt.openmmlab.registry import MODELS

from ..checkpoints.pickles import saved
from ..models.building import CASES
from .cases import refused


def build(seed: int, **options: object) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS.build(copy.deepcopy(CASES['ViT3']) | options)


SOURCE = build(0)
WEIGHTS = SOURCE.state_dict()
WHOLE = saved({'state_dict': {f'backbone.{n}': w for n, w in WEIGHTS.items()}, 'meta': {}})


def load(path: Path) -> None:
    model = build(1)
    load_pretrained(model, path, prefix='backbone')
    torch.testing.assert_close(model.state_dict(), WEIGHTS, rtol=0, atol=0)


def test_truncated(tmp_path: Path) -> None:
    for length in np.random.default_rng(0).integers(0, len(WHOLE), 16).tolist():
        (tmp_path / 'a.pth').write_bytes(WHOLE[:length])
        refused(lambda: load(tmp_path / 'a.pth'), 'a.pth', kind=CheckpointError)


def test_flipped_bits(tmp_path: Path) -> None:
    """Most lie in the numbers of a tensor, where torch alone reads them without a word."""
    (tmp_path / 'a.pth').write_bytes(WHOLE)
    load(tmp_path / 'a.pth')
    refusals = []
    for i, at in enumerate(np.random.default_rng(0).integers(0, len(WHOLE), 60).tolist()):
        damaged = bytearray(WHOLE)
        damaged[at] ^= 1 << i % 8
        (tmp_path / 'a.pth').write_bytes(damaged)
        try:
            # Reads the right weights, or not at all.
            load(tmp_path / 'a.pth')
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 40
    assert all('a.pth' in sentence for sentence in refusals)
    assert any("checksum of its part 'archive/data/" in sentence for sentence in refusals)


@pytest.mark.parametrize('shape', [(), (16, 64), (1, 15, 64), (1, 0, 64), (1, 9, 63), (2, 9, 64)])
def test_a_position_embedding_that_is_none_is_reported(shape: tuple, tmp_path: Path) -> None:
    (tmp_path / 'a.pth').write_bytes(saved({**WEIGHTS, 'pos_embed': torch.zeros(shape)}))
    model = build(1, pos_embed=True, img_size=64)
    assert 'pos_embed' in str(load_pretrained(model, tmp_path / 'a.pth').mismatched)


@pytest.mark.parametrize('value', [None, 3, ['a.pth']])
def test_wrong_arguments(value: object, tmp_path: Path) -> None:
    (tmp_path / 'a.pth').write_bytes(WHOLE)
    refused(lambda: load_pretrained(SOURCE, value), repr(value), 'path', kind=TypeError)
    if value is not None:
        wrong_prefix = dict(checkpoint=tmp_path / 'a.pth', prefix=value)
        refused(lambda: load_pretrained(SOURCE, **wrong_prefix), 'prefix', kind=TypeError)
    refused(lambda: load_pretrained(SOURCE, tmp_path), 'no weights', kind=CheckpointError)
