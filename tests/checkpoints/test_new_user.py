"""The commands of docs/distil.md, from a folder of transformers to a probed twin, in small."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.models.backbones import TimmViT

from .test_kinds import KINDS, SMALL, made_up

pytest.importorskip('mmengine')
pytest.importorskip('sklearn')

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = dict(model_options=SMALL, patch_size=8)
MODEL = 'vit_small_patch16_dinov3'


def commands() -> list[str]:
    """The first block of the page, a command a line."""
    block = re.search(r'```console\n(.*?)```', (ROOT / 'docs/distil.md').read_text(), re.DOTALL)
    assert block is not None
    return block[1].replace('\\\n', ' ').strip().split('\n')


def images(folder: Path, level: int) -> None:
    folder.mkdir(parents=True)
    for i in range(4):
        pixels = level + np.random.default_rng(i).integers(0, 50, (20, 30, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f'{i}.png')


def test_five_commands(tmp_path: Path) -> None:
    download, train, probe, publish, detector = commands()
    folder = re.fullmatch(r'hf download \S*dinov3-vits16\S* --local-dir (\w+)', download)
    assert folder is not None
    generator = torch.Generator().manual_seed(0)
    # As facebook/dinov3-vits16 has them, random and narrow.
    names = made_up(KINDS['DINOv3 without biases, folder'][0])
    weights = {n: 0.2 * torch.randn(w.shape, generator=generator) for n, w in names.items()}
    (tmp_path / folder[1]).mkdir()
    save_file(weights, tmp_path / folder[1] / 'model.safetensors')
    images(tmp_path / 'pictures', 50)
    for part in ('train', 'test'):
        for name, level in (('bright', 200), ('dark', 0)):
            images(tmp_path / 'by_class' / part / name, level)
    (tmp_path / 'tools').symlink_to(ROOT / 'tools')
    (tmp_path / 'configs').mkdir()
    (tmp_path / 'configs/distil_dinov3_s_10k.py').write_text(
        f"_base_ = '{ROOT}/configs/distil_dinov3_s_10k.py'\n"
        f'model = dict(sizes=[32], backbone=dict(**{OPTIONS}))\n'
        'train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)\n'
        'train_cfg = dict(max_iters=2)\n'
        "custom_hooks = [dict(type='mmvttt.BlockwiseHook', iters=1)]\n"
    )
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    for command in (train, probe, publish):
        done = subprocess.run(
            ['bash', '-euc', command.replace('iter_10000', 'iter_2')],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, 'PATH': path},
        )
        assert done.returncode == 0, f'{command}: {done.stderr[-2000:]}'
    rows = (tmp_path / 'work_dirs/probe/probe.csv').read_text().split('\n')
    assert [row.split(',')[0] for row in rows] == ['model', 'source', 'source', 'twin', 'twin', '']
    (published,) = tmp_path.glob('twin-*.safetensors')
    assert re.search(r'init_cfg\.checkpoint=twin-\w+\.safetensors', detector)
    twin = TimmViT(MODEL, linearize=dict(), **OPTIONS)
    report = load_pretrained(twin, published)
    assert not report.missing
    assert not report.unexpected
