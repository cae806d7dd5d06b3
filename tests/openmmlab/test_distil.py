"""Distillation: losses as defined, the source untouched, what is new alone first, and a run."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import init_default_scope
from PIL import Image

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.errors import UsageError
from mmvttt.models.backbones import TimmViT
from mmvttt.openmmlab.registry import MODELS

from ..models.test_distillation import OPTIONS, source_and_twin

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_and_its_twin(tmp_path: Path) -> None:
    source, _ = source_and_twin()
    torch.save(source.state_dict(), tmp_path / 'source.pth')
    (tmp_path / 'pictures').mkdir()
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 255, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / 'pictures' / f'{i}.png')
    options = dict(OPTIONS)
    (tmp_path / 'tiny.py').write_text(
        f"_base_ = '{ROOT}/configs/distil_dinov3_s_10k.py'\n"
        f"init = dict(type='Pretrained', checkpoint='{tmp_path}/source.pth')\n"
        f'model = dict(sizes=[32, (32, 48)], backbone=dict(**{options}, init_cfg=init))\n'
        f'train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False,'
        f" dataset=dict(data_root='{tmp_path}/pictures'))\n"
        'train_cfg = dict(max_iters=4)\n'
        "custom_hooks = [dict(type='mmvttt.BlockwiseHook', iters=2)]\n"
        'default_hooks = dict(checkpoint=dict(interval=2), logger=dict(interval=1))\n'
        'randomness = dict(seed=0)\n'
    )

    def train(name: str, *more: str) -> dict:
        command = [sys.executable, str(ROOT / 'tools/train.py'), str(tmp_path / 'tiny.py')]
        run = subprocess.run(
            [*command, '--work-dir', str(tmp_path / name), *more],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        assert 'explained_last' in run.stdout + run.stderr
        for network in ('backbone', 'source'):
            words = f'weights of {network} were trained on images of mean=[127.5, 127.5, 127.5]'
            assert (words in run.stdout + run.stderr) == (mean[0] == 0.5)
        return torch.load(tmp_path / name / 'iter_4.pth', weights_only=False)['state_dict']

    # timm's file beside the weights; the config has ImageNet's values.
    mean, std = [0.5, 0.5, 0.5], [0.229, 0.224, 0.225]
    beside = tmp_path / 'config.json'
    beside.write_text(json.dumps(dict(pretrained_cfg=dict(mean=mean, std=std))))
    whole = train('a')
    mean = [0.485, 0.456, 0.406]
    beside.write_text(json.dumps(dict(pretrained_cfg=dict(mean=mean, std=std))))
    resumed = tmp_path / 'b'
    resumed.mkdir()
    (resumed / 'iter_2.pth').write_bytes((tmp_path / 'a' / 'iter_2.pth').read_bytes())
    again = train('b', '--resume', str(resumed / 'iter_2.pth'))
    assert all(torch.equal(whole[n], again[n]) for n in whole)
    own = source.state_dict()
    assert all(torch.equal(whole[f'source.{n}'], w) for n, w in own.items())
    assert not all(torch.equal(whole[f'backbone.{n}'], w) for n, w in own.items())
    twin = TimmViT(**OPTIONS, linearize=dict())
    report = load_pretrained(twin, tmp_path / 'a' / 'iter_4.pth')
    assert not report.missing
    assert all(torch.equal(whole[f'backbone.{n}'], w) for n, w in twin.state_dict().items())


def test_mistakes_are_named() -> None:
    init_default_scope('mmpretrain')
    backbone = dict(OPTIONS, type='mmvttt.TimmViT', linearize=dict())
    with pytest.raises(UsageError, match='backbone has no init_cfg'):
        MODELS.build(dict(type='mmvttt.Distil', backbone=backbone))
    init = dict(type='Pretrained', checkpoint='a.pth')
    with pytest.raises(UsageError, match=r'set linearize=dict\(\)'):
        MODELS.build(
            dict(type='mmvttt.Distil', backbone=dict(backbone, linearize=None, init_cfg=init))
        )
    with pytest.raises(ValueError, match="loss='cosin'"):
        MODELS.build(dict(type='mmvttt.Distil', backbone=backbone, loss='cosin'))


def test_blocks_one_by_one_leave_frozen_stages_frozen(tmp_path: Path) -> None:
    source = MODELS.build(dict(OPTIONS, type='mmvttt.TimmViT'))
    torch.save(source.state_dict(), tmp_path / 'source.pth')
    init = dict(type='Pretrained', checkpoint=str(tmp_path / 'source.pth'))
    backbone = dict(OPTIONS, type='mmvttt.TimmViT', frozen_stages=1, init_cfg=init)
    model = MODELS.build(dict(type='mmvttt.Distil', backbone=dict(backbone, linearize=dict())))
    model.train()
    before = [p.requires_grad for p in model.parameters()]
    model.set_blockwise(True)
    assert sum(p.requires_grad for p in model.parameters()) < sum(before)
    model.set_blockwise(False)
    assert [p.requires_grad for p in model.parameters()] == before
