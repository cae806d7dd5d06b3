"""Checkpoints that are damaged, hostile or of something else: an error, or the right weights."""

import copy
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.publish import describe_checkpoint, publish_checkpoint
from mmvttt.convert import convert_checkpoint, to_public
from mmvttt.errors import CheckpointError, UsageError
from mmvttt.openmmlab.registry import MODELS

from .cases import refused
from .models import BASES


def build(seed: int, **options: object) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS.build(copy.deepcopy(BASES['ViT3']) | options)


SOURCE = build(0)
WEIGHTS = SOURCE.state_dict()


def in_backbone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f'backbone.{name}': tensor for name, tensor in weights.items()}


def saved(content: object, **options: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


WHOLE = saved({'state_dict': in_backbone(WEIGHTS), 'meta': {'epoch': 3}})


def load(path: Path) -> None:
    model = build(1)
    load_pretrained(model, path, prefix='backbone')
    assert_equal(model.state_dict(), WEIGHTS)


def init(path: Path) -> None:
    model = build(1, init_cfg=dict(type='Pretrained', checkpoint=str(path), prefix='backbone.'))
    model.init_weights()
    assert_equal(model.state_dict(), WEIGHTS)


def publish(path: Path) -> None:
    out = publish_checkpoint(path, path.with_name('published.pth'), 'backbone.')
    assert_equal(torch.load(out, weights_only=True)['state_dict'], WEIGHTS)


def convert(path: Path) -> None:
    conversion = convert_checkpoint(path, path.with_name('converted.pth'), to='public')
    assert_equal(conversion.weights, to_public(in_backbone(WEIGHTS)).weights)


def describe(path: Path) -> None:
    assert f'{len(WEIGHTS)} tensors' in describe_checkpoint(path)


READERS: tuple[Callable[[Path], None], ...] = (load, init, publish, convert, describe)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def test_truncated(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(0, len(WHOLE), 4 * len(READERS)).reshape(-1, 4)
    for read, some in zip(READERS, lengths.tolist(), strict=True):
        for length in some:
            (tmp_path / 'a.pth').write_bytes(WHOLE[:length])
            refused(lambda read=read: read(tmp_path / 'a.pth'), 'a.pth', kind=CheckpointError)


def test_flipped_bits(tmp_path: Path) -> None:
    """Most lie in the numbers of a tensor, where torch alone reads them without a word."""
    (tmp_path / 'a.pth').write_bytes(WHOLE)
    for read in READERS:
        read(tmp_path / 'a.pth')
    refusals = []
    for i, at in enumerate(np.random.default_rng(0).integers(0, len(WHOLE), 60).tolist()):
        damaged = bytearray(WHOLE)
        damaged[at] ^= 1 << i % 8
        (tmp_path / 'a.pth').write_bytes(damaged)
        try:
            # Reads the right weights, or not at all.
            READERS[i % len(READERS)](tmp_path / 'a.pth')
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 40
    assert all('a.pth' in sentence for sentence in refusals)
    assert any("checksum of its part 'archive/data/" in sentence for sentence in refusals)


@pytest.mark.parametrize('shape', [(), (16, 32), (1, 15, 32), (1, 0, 32), (1, 9, 31), (2, 9, 32)])
def test_a_position_embedding_that_is_none_is_reported(shape: tuple, tmp_path: Path) -> None:
    (tmp_path / 'a.pth').write_bytes(saved({**WEIGHTS, 'pos_embed': torch.zeros(shape)}))
    model = build(1, pos_embed=True, img_size=64)
    assert 'pos_embed' in str(load_pretrained(model, tmp_path / 'a.pth').mismatched)


def test_wrong_arguments(tmp_path: Path) -> None:
    (tmp_path / 'a.pth').write_bytes(WHOLE)
    for value in (None, 3, ['a.pth']):
        refused(lambda v=value: load_pretrained(SOURCE, v), repr(value), 'path', kind=TypeError)
    for value in (3, ['backbone']):
        refused(
            lambda v=value: load_pretrained(SOURCE, tmp_path / 'a.pth', prefix=v),
            'prefix', kind=TypeError,
        )  # fmt: skip
    refused(lambda: load_pretrained(SOURCE, tmp_path), 'no weights', kind=CheckpointError)
    with pytest.raises(UsageError, match=r"no tensor has the prefix 'neck'.*backbone"):
        publish_checkpoint(tmp_path / 'a.pth', tmp_path / 'b.pth', 'neck')
