"""Distillation: losses as defined, the source untouched, what is new alone first, and a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import init_default_scope
from PIL import Image

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.errors import OptionError, UsageError
from mmvttt.models.backbones import TimmViT
from mmvttt.openmmlab.apis.train import train
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

    def run(name: str, mean: float, resume: str | None = None) -> dict:
        # timm's file beside the weights; the config has ImageNet's values.
        content = dict(mean=[mean, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        (tmp_path / 'config.json').write_text(json.dumps(dict(pretrained_cfg=content)))
        work_dir = tmp_path / name
        options = {'experiment_name': f'{tmp_path.name}_{name}'}
        train(tmp_path / 'tiny.py', work_dir=str(work_dir), resume=resume, cfg_options=options)
        log = ''.join(p.read_text() for p in work_dir.glob('*/*.log'))
        assert 'explained_last' in log
        for network in ('backbone', 'source'):
            words = f'model.{network} was trained on images of data_preprocessor.mean=[127.5, '
            assert (words in log) == (mean == 0.5)
        return torch.load(work_dir / 'iter_4.pth', weights_only=False)['state_dict']

    whole, again = run('a', 0.5), run('b', 0.485, str(tmp_path / 'a' / 'iter_2.pth'))
    assert all(torch.equal(whole[n], again[n]) for n in whole)
    before = source.state_dict()
    assert all(torch.equal(whole[f'source.{n}'], w) for n, w in before.items())
    assert not all(torch.equal(whole[f'backbone.{n}'], w) for n, w in before.items())
    twin = TimmViT(**OPTIONS, linearize=dict())
    report = load_pretrained(twin, tmp_path / 'a' / 'iter_4.pth')
    assert not report.missing
    assert all(torch.equal(whole[f'backbone.{n}'], w) for n, w in twin.state_dict().items())


def test_mistakes_are_named() -> None:
    init_default_scope('mmpretrain')
    backbone = dict(OPTIONS, type='mmvttt.TimmViT', linearize=dict())
    init = dict(type='Pretrained', checkpoint='a.pth')
    for wrong in (backbone, dict(backbone, linearize=None, init_cfg=init)):
        with pytest.raises(UsageError):
            MODELS.build(dict(type='mmvttt.Distil', backbone=wrong))
    with pytest.raises(OptionError):
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
