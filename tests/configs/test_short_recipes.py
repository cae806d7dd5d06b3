"""`tools/train.py` on a reduced copy of each paper's recipe: the rates that it prints.

Reduced are the model, the images and the length; optimizer, schedule, precision, averages, data
set and augmentation are the config's.
"""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config

from mmvttt.config import load_config

from .reduced import SIZE as SIDES
from .reduced import reduce_model

TOOL = Path(__file__).resolve().parents[2] / 'tools' / 'train.py'
IMAGES, BATCH, EPOCHS = 4, 2, 15


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images of noise each, where the configs look for ImageNet, COCO and ADE20K."""
    root = tmp_path_factory.mktemp('data')
    rng = np.random.default_rng(0)
    ade = root / 'ade/ADEChallengeData2016'
    photos = [root / 'coco/train2017', ade / 'images/training']
    photos += [root / f'imagenet/train/{label:04}' for label in range(1000)]
    for folder in (*photos, root / 'coco/annotations', ade / 'annotations/training'):
        folder.mkdir(parents=True)
    for i, folder in itertools.product(range(IMAGES), photos[:3]):
        cv2.imwrite(str(folder / f'{i}.jpg'), rng.integers(0, 255, (*SIDES, 3)))
        cv2.imwrite(str(ade / f'annotations/training/{i}.png'), rng.integers(0, 151, SIDES))
    images = [dict(id=i, file_name=f'{i}.jpg', height=64, width=96) for i in range(IMAGES)]
    square = dict(bbox=[8, 8, 40, 40], area=1600, iscrowd=0, category_id=1)
    square['segmentation'] = [[8, 8, 48, 8, 48, 48, 8, 48]]
    coco = dict(
        images=images,
        annotations=[dict(square, id=i + 1, image_id=i) for i in range(IMAGES)],
        categories=[dict(id=1, name='person')],
    )
    (root / 'coco/annotations/instances_train2017.json').write_text(json.dumps(coco))
    return root


def shrink(node: object) -> None:
    """Images of 64×96 in whatever a pipeline holds."""
    side, size = SIDES
    small = dict(scales=[(size, side)], scale=side, crop_size=(side // 2, side))
    if isinstance(node, dict):
        for key in set(small) & set(node):
            node[key] = small[key] if node['type'] != 'RandomResize' else (4 * size, size)
    for value in node.values() if isinstance(node, dict) else node:
        if isinstance(value, dict | list | tuple):
            shrink(value)


def reduce(name: str) -> Config:
    """The config with a small model, on four images, without evaluation."""
    cfg = load_config(name)
    loader = cfg.train_dataloader
    loader.update(batch_size=BATCH, num_workers=0, persistent_workers=False)
    shrink(loader.dataset.pipeline)
    cfg.default_hooks.logger.interval = 1
    cfg.default_hooks.checkpoint = None
    reduce_model(cfg)
    if cfg.default_scope == 'mmseg':
        cfg.model.data_preprocessor.size = (SIDES[0] // 2, SIDES[0])
        cfg.train_cfg.max_iters = 8
    elif cfg.default_scope == 'mmdet':
        # The larger part of a step, and bf16 is slow on most CPUs.
        cfg.model.roi_head.mask_head.update(num_convs=1, conv_out_channels=16)
    else:
        cfg.train_cfg.max_epochs = EPOCHS
    for part in ('val', 'test'):
        for key in ('_dataloader', '_cfg', '_evaluator'):
            cfg[part + key] = None
    return cfg


def warm_up(first: float, length: int) -> list[float]:
    """mmengine's: the full rate at its last step."""
    return [first + (1 - first) * t / (length - 1) for t in range(8)]


def cosine() -> list[float]:
    """Thirty steps, two of them warm-up."""
    total = EPOCHS * IMAGES // BATCH
    curve = 0.01 + 0.99 * (1 + np.cos(np.pi * np.arange(total) / total)) / 2
    return [0.001, 0.5005, *curve[2:]]


def by_epoch() -> list[float]:
    """A rate for each epoch, two of them warm-up."""
    t = np.arange(EPOCHS)
    curve = 0.01 + 0.99 * (1 + np.cos(np.pi * t / EPOCHS)) / 2
    return np.repeat([0.001, 0.5005, *curve[2:]], IMAGES // BATCH).tolist()


# The rate of the first group of parameters, the one that is printed; then its course.
RATES = {
    'vittt_t_in1k': (1e-3, cosine()),
    'vit3_t_in1k': (4e-3 * BATCH / 4096, cosine()),
    'hvit3_t_in1k': (4e-3 * BATCH / 4096, cosine()),
    'hvit3_t_mesa_in1k': (4e-3 * BATCH / 4096, cosine()),
    't5_t_in1k_30e': (4e-5, by_epoch()),
    # The patch embedding is six layers below the top of the reduced backbone of four blocks.
    'maskrcnn_vittt_t_1x': (1e-4 * 0.85**5, warm_up(1e-3, 500)),
    'maskrcnn_hvit3_t_1x': (2e-4 * BATCH / 32, warm_up(1e-3, 1000)),
    'maskrcnn_hvit3_t_3x': (2e-4 * BATCH / 32, warm_up(1e-3, 1000)),
    'upernet_vittt_t_160k': (12e-5 * 0.95**5, warm_up(1e-6, 1500)),
    'upernet_hvit3_t_160k': (6e-5, warm_up(1e-6, 1500)),
    'upernet_hvit3_s_160k': (6e-5, warm_up(1e-6, 1500)),
}


@pytest.mark.stress
@pytest.mark.parametrize('name', RATES)
def test_a_short_training_prints_the_rates_of_the_recipe(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('MMVTTT_DATA', str(data))
    path = tmp_path / f'{name}.py'
    reduce(name).dump(path)
    ran = subprocess.run(
        [sys.executable, TOOL, path, '--work-dir', tmp_path / 'work'],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    printed = [float(rate) for rate in re.findall(r'[ \t]lr: (\S+)', ran.stdout + ran.stderr)]
    rate, course = RATES[name]
    print(f'{name}: {len(printed)} steps: {" ".join(f"{r:.4e}" for r in printed)}')
    assert len(printed) >= len(course)
    # Five digits are printed.
    assert printed[: len(course)] == pytest.approx([rate * part for part in course], rel=1e-4)
    assert not re.search(r'loss: (nan|inf)', ran.stdout)
