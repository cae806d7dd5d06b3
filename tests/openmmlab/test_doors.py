"""Doors for a user's own parts: a model of timm's, a backbone, a refused training's folder."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from mmengine.registry import MODELS
from torch import nn

import mmvttt
from mmvttt.errors import DataError, OptionError, UsageError
from mmvttt.openmmlab.register import register


@pytest.mark.parametrize('linear', [False, True])
def test_a_model_of_timm_is_a_backbone(linear: bool) -> None:
    torch.manual_seed(0)
    vit = timm.create_model('vit_tiny_patch16_224', depth=2, embed_dim=32, num_heads=2, img_size=64)
    if linear:
        mmvttt.linearize(vit, where=[1])
    backbone = mmvttt.TimmViT(vit.eval()).eval()
    image = torch.randn(1, 3, 64, 64)
    # The same operations; the features of the class token are left out.
    tokens = vit.forward_features(image)[:, 1:]
    assert torch.equal(backbone(image)[0].flatten(2).transpose(1, 2), tokens)
    adapter = mmvttt.ViTAdapter(backbone, norm_layer='BN', conv_inplane=8).eval()
    assert [out.shape[-1] for out in adapter(image)] == [16, 8, 4, 2]
    with pytest.raises(TypeError, match=r'TimmViT\(vit\)'):
        mmvttt.ViTAdapter(vit)


def test_a_model_that_timm_did_not_make_or_that_was_changed_is_refused() -> None:
    with pytest.raises(OptionError, match='did not make'):
        mmvttt.TimmViT(timm.models.VisionTransformer(depth=1))
    vit = timm.create_model('vit_tiny_patch16_224', depth=1)
    vit.blocks[0].mlp.fc1 = nn.Identity()
    with pytest.raises(OptionError, match=r'lacks blocks\.0\.mlp\.fc1'):
        mmvttt.TimmViT(vit)


def test_a_backbone_of_one_s_own_has_init_cfg(tmp_path: Path) -> None:
    @register
    class OneLayer(nn.Module):
        def __init__(self, dims: int = 3) -> None:
            super().__init__()
            self.layer = nn.Linear(dims, 1)

    torch.save(OneLayer(dims=5).state_dict(), tmp_path / 'a.pth')
    init = dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'))
    model = MODELS.build(dict(type='OneLayer', dims=5, init_cfg=init))
    model.init_weights()
    weight = torch.load(tmp_path / 'a.pth')['layer.weight']
    torch.testing.assert_close(model.layer.weight, weight, rtol=0, atol=0)


def test_a_refused_training_leaves_no_folder(run: Callable) -> None:
    with pytest.raises((DataError, UsageError, ValueError)):
        run('train', work_dir='a/b', resume='nowhere.pth')
    assert not Path('a').exists()


def test_no_workers_need_no_other_option(run: Callable) -> None:
    for loader in ('train_dataloader', 'val_dataloader'):
        options = {f'{loader}.persistent_workers': True, f'{loader}.num_workers': 0}
        run('train', work_dir=loader, cfg_options={'train_cfg.max_epochs': 1, **options})


def test_launchers_of_the_shell_are_tools() -> None:
    for tool, usage in (('dist_train', 'CONFIG GPUS'), ('slurm-train', 'PARTITION JOB_NAME')):
        command = [sys.executable, '-m', 'mmvttt', tool]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert usage in done.stderr
