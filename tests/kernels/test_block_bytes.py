"""The count of what a block moves: by hand where that is easy, and as docs/kernels.md has it."""

from pathlib import Path

import block_bytes
import pytest
import torch
from block_bytes import Traffic, as_on_a_gpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

DOCS = Path(__file__).resolve().parents[2] / 'docs/kernels.md'


def test_a_linear_layer_and_a_norm_by_hand():
    fake = FakeTensorMode()
    with as_on_a_gpu(fake), torch.no_grad():
        linear, norm = nn.Linear(8, 16, bias=False), nn.LayerNorm(16)
        x = torch.empty(2, 5, 8)
        with Traffic() as found:
            norm(linear(x))
    casts = 6 * (80 + 8 * 16) + 6 * 160  # x, the weight; LayerNorm in fp32
    assert found.bytes == {
        'aten::_to_copy': casts,
        'aten::mm': 2 * (80 + 8 * 16 + 160),
        'aten::native_layer_norm': 4 * (2 * 160 + 2 * 16 + 2 * 10),
    }
    assert found.launches.total() == 5


def test_views_are_free_and_expanded_tensors_have_their_numbers_once():
    with Traffic() as found:
        x = torch.ones(3, 1).expand(3, 7)
        x.mT.unflatten(0, (7, 1)).add(1)
    assert found.bytes == {'aten::ones': 12, 'aten::add': 12 + 84}


@pytest.mark.parametrize(
    'model',
    [
        pytest.param(n, marks=() if n == 'ViT³-S' else pytest.mark.stress)
        for n in block_bytes.BLOCKS
    ],
)
@pytest.mark.parametrize('fused', [True, False])
def test_the_documented_table_is_what_the_command_counts(model, fused):
    assert block_bytes.row(model, fused) in DOCS.read_text()


@pytest.mark.stress
def test_the_documented_step_of_mask_rcnn_is_what_the_command_counts():
    pytest.importorskip('mmdet')
    import mask_rcnn_bytes

    assert mask_rcnn_bytes.table(mask_rcnn_bytes.step('maskrcnn_vittt_s_1x', 2)) in DOCS.read_text()
