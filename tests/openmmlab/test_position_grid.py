"""Position embeddings of another grid: what is taken for it, and every way by which they load."""

from pathlib import Path

import pytest
import torch
from mmengine.runner import load_checkpoint, save_checkpoint
from mmengine.runner.checkpoint import get_state_dict, weights_to_cpu
from torch import Tensor, nn
from torch.nn import functional as F

from mmvttt.checkpoints.publish import publish_checkpoint
from mmvttt.openmmlab.register import Vittt

ARCH = dict(embed_dims=8, num_layers=1, num_heads=1, feedforward_channels=8)
SQUARE = (64, 64)


def vittt(img_size: tuple[int, int], **options) -> Vittt:
    return Vittt(ARCH, img_size=img_size, **options)


def resized(source: Vittt, grid: tuple[int, int]) -> Tensor:
    maps = source.pos_embed.detach().mT.unflatten(2, source.grid)
    return F.interpolate(maps, grid, mode='bicubic').flatten(2).mT


@pytest.mark.parametrize('size', [(128, 256), (96, 96)])
@pytest.mark.parametrize('way', ['torch', 'mmengine', 'Pretrained', 'DDP', 'published'])
def test_a_square_is_resized(size: tuple[int, int], way: str, tmp_path: Path) -> None:
    source, file = vittt(SQUARE), tmp_path / 'a.pth'
    whole, target = nn.ModuleDict({'backbone': source}), vittt(size)
    content = get_state_dict(nn.ModuleDict({'module': whole}) if way == 'DDP' else whole)
    save_checkpoint({'state_dict': weights_to_cpu(content), 'meta': {}}, str(file))
    if way == 'torch':
        nn.ModuleDict({'backbone': target}).load_state_dict(torch.load(file)['state_dict'])
    elif way == 'mmengine':
        load_checkpoint(nn.ModuleDict({'backbone': target}), str(file), strict=True)
    else:
        if way == 'published':
            file = publish_checkpoint(file, tmp_path / 'b.pth')
        target = vittt(
            size, init_cfg=dict(type='Pretrained', checkpoint=str(file), prefix='backbone')
        )
        target.init_weights()
    torch.testing.assert_close(target.pos_embed.detach(), resized(source, target.grid))
    assert target.grid == (size[0] // 16, size[1] // 16)


# As many as the target's own, of another grid; and a number that is no square.
@pytest.mark.parametrize(('stored', 'size'), [((128, 512), (256, 256)), ((224, 208), (96, 96))])
def test_others_stay_as_they_are(stored: tuple[int, int], size: tuple[int, int]) -> None:
    source, target = vittt(stored), vittt(size)
    state = source.state_dict()
    assert set(state) == {name for name, _ in source.named_parameters()}
    target.adapt_weights(state)
    assert torch.equal(state['pos_embed'], source.pos_embed)


def test_another_shape_by_set_image_size() -> None:
    source, target = vittt((128, 512)), vittt((128, 512))
    target.load_state_dict(source.state_dict())
    target.set_image_size(96)
    torch.testing.assert_close(target.pos_embed.detach(), resized(source, (6, 6)))
