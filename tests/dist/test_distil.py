"""Distillation on two processes in mixed precision: blocks alone first, then the whole twin."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mmvttt.checkpoints.read import read_content
from mmvttt.models.backbones import TimmViT

from .launch import TOOLS, run_nodes

pytestmark = pytest.mark.stress
OPTIONS = dict(
    model='vit_small_patch16_dinov3',
    model_options=dict(embed_dim=32, depth=2, num_heads=2),
    img_size=32,
)


def test_distil(tmp_path: Path) -> None:
    source = TimmViT(**OPTIONS)
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch.save(source.state_dict(), tmp_path / 'source.pth')
    (tmp_path / 'pictures').mkdir()
    for i in range(8):
        pixels = np.random.default_rng(i).integers(0, 255, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / 'pictures' / f'{i}.png')
    (tmp_path / 'tiny.py').write_text(
        f"_base_ = '{TOOLS.parent}/configs/distil_dinov3_s_10k.py'\n"
        f"init = dict(type='Pretrained', checkpoint='{tmp_path}/source.pth')\n"
        f'model = dict(sizes=[32, (32, 48)], backbone=dict(**{OPTIONS}, init_cfg=init))\n'
        'train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False,'
        f" dataset=dict(data_root='{tmp_path}/pictures'))\n"
        'train_cfg = dict(max_iters=4)\n'
        "custom_hooks = [dict(type='mmvttt.BlockwiseHook', iters=2)]\n"
        'default_hooks = dict(checkpoint=dict(interval=2), logger=dict(interval=1))\n'
    )
    run = tmp_path / 'run'
    (text,) = run_nodes(tmp_path / 'tiny.py', run, '--amp', '--work-dir', str(run), nodes=1)
    assert 'explained_last' in text
    first, last = (read_content(run / f'iter_{i}.pth')['state_dict'] for i in (2, 4))
    old = source.state_dict()
    assert all(torch.equal(first[f'backbone.{n}'], w) for n, w in old.items())
    assert all(torch.equal(last[f'source.{n}'], w) for n, w in old.items())
    new = [n for n in first if n.startswith('backbone.') and n[9:] not in old]
    moved = [n for n in first if not torch.equal(first[n], last[n])]
    assert set(new) < set(moved)
