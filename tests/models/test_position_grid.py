"""Position embeddings of any grid: noted with the weights, and what is taken without the note."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmengine.logging import MMLogger
from mmengine.runner import load_checkpoint, save_checkpoint
from mmengine.runner.checkpoint import get_state_dict, weights_to_cpu
from torch import Tensor, nn
from torch.nn import functional as F

from mmvttt.checkpoints.publish import publish_checkpoint
from mmvttt.models.backbones import Vittt

ARCH = dict(embed_dims=8, num_layers=1, num_heads=1, feedforward_channels=8)
WIDE = (128, 512)  # a grid of 8×32


def vittt(img_size: tuple[int, int], **options) -> Vittt:
    return Vittt(ARCH, img_size=img_size, **options)


def resized(source: Vittt, grid: tuple[int, int]) -> Tensor:
    maps = source.pos_embed.detach().mT.unflatten(2, source.grid)
    return F.interpolate(maps, grid, mode='bicubic').flatten(2).mT


@pytest.fixture
def logged(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture) -> Callable[[], str]:
    """The log so far: by a new logger, as one keeps the stdout of its first use."""
    MMLogger.get_instance(request.node.name)
    return lambda: ''.join(capsys.readouterr())


# Fewer positions that could be of a square before, as many, and as many in a square.
@pytest.mark.parametrize('size', [(128, 256), (512, 128), (256, 256)])
@pytest.mark.parametrize('way', ['torch', 'mmengine', 'Pretrained', 'DDP', 'published', 'by hand'])
def test_the_grid_is_noted(
    size: tuple[int, int], way: str, tmp_path: Path, logged: Callable[[], str]
) -> None:
    source, file = vittt(WIDE), tmp_path / 'a.pth'
    whole, target = nn.ModuleDict({'backbone': source}), vittt(size)
    content = get_state_dict(nn.ModuleDict({'module': whole}) if way == 'DDP' else whole)
    save_checkpoint({'state_dict': weights_to_cpu(content), 'meta': {}}, str(file))
    if way == 'torch':
        nn.ModuleDict({'backbone': target}).load_state_dict(torch.load(file)['state_dict'])
    elif way == 'mmengine':
        load_checkpoint(nn.ModuleDict({'backbone': target}), str(file), strict=True)
    elif way == 'by hand':
        state = source.state_dict()
        target.adapt_weights(state)
        target.load_state_dict(state)
    else:
        if way == 'published':
            file = publish_checkpoint(file, tmp_path / 'b.pth')
        target = vittt(
            size, init_cfg=dict(type='Pretrained', checkpoint=str(file), prefix='backbone')
        )
        target.init_weights()
    torch.testing.assert_close(target.pos_embed.detach(), resized(source, target.grid))
    assert target.grid == (size[0] // 16, size[1] // 16)
    assert 'do not say' not in logged()


def test_the_note_is_no_entry() -> None:
    source, target = vittt(WIDE), vittt(WIDE)
    state = source.state_dict()
    assert set(state) == {name for name, _ in source.named_parameters()}
    # As old checkpoints are: strict, no key more or less.
    target.load_state_dict(dict(state), strict=True)
    assert torch.equal(target.pos_embed, source.pos_embed)


@pytest.mark.parametrize('note', [None, 5, {}, {'grid': 7}, {'grid': (0, 5)}, {'grid': (3, 5)}])
def test_odd_notes_do_no_harm(note: object) -> None:
    source, target = vittt((64, 64)), vittt((96, 96))
    state = OrderedDict(pos_embed=source.pos_embed.detach())
    state._metadata = {'': note}
    target.adapt_weights(state)
    torch.testing.assert_close(state['pos_embed'], resized(source, (6, 6)))


@pytest.mark.parametrize(
    ('stored', 'size', 'taken'),
    [
        ((64, 64), (96, 96), '4×4'),
        ((64, 64), (96, 160), '4×4'),
        # 50×84 has 48 readings, and one of about 32:54.
        ((800, 1344), (512, 864), '50×84'),
        # 14×13 and 13×14 are equally near to a square; nothing is near to 4:1 in 15.
        ((224, 208), (96, 96), None),
        ((48, 80), (512, 128), None),
    ],
)
def test_without_the_note(
    stored: tuple[int, int], size: tuple[int, int], taken: str | None, logged: Callable[[], str]
) -> None:
    source, target = vittt(stored), vittt(size)
    state = dict(source.state_dict())
    target.adapt_weights(state)
    expected = resized(source, target.grid) if taken else source.pos_embed.detach()
    torch.testing.assert_close(state['pos_embed'], expected)
    out = logged()
    # A square for a square is what everybody expects.
    if size == (96, 96) and taken:
        assert 'do not say' not in out
    else:
        assert f'{source.pos_embed.shape[1]} positions' in out
        assert f'taken: {taken or "none, and it is not resized"}' in out
