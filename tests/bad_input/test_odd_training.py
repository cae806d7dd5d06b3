"""A Mask R-CNN steps on odd annotations, through mmdet's own pipeline, with finite losses."""

from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, init_default_scope

from mmvttt.registry import MODELS

from ..reliability.data.faults import FAULTS
from ..reliability.data.sets import coco, coco_dataset, make_coco, write
from .cases import run_cases
from .models import PLAIN

pytest.importorskip('mmdet')
CONFIG = Path(__file__).resolve().parents[2] / 'configs/maskrcnn_vittt_demo.py'
# Faults that mmdet accepts; the check of the data refuses the others.
ODD = {name: change for name, (change, _, fatal) in FAULTS.items() if not fatal}
ODD['crowd'] = lambda ann: ann.update(iscrowd=1)
ODD['ignored'] = lambda ann: ann.update(ignore=1)
ODD['as it is'] = lambda ann: None
ODD['gone'] = lambda ann: ann.update(image_id=99)


@pytest.fixture(scope='module')
def detector() -> torch.nn.Module:
    cfg = Config.fromfile(CONFIG)
    init_default_scope('mmdet')
    model = cfg.model
    model.backbone.backbone.arch = PLAIN
    model.backbone.interaction_indexes = [[0, 0], [1, 2]]
    model.backbone.conv_inplane = 8
    model.neck.in_channels = [32] * 4
    model.roi_head.bbox_head.update(fc_out_channels=32, num_classes=2)
    model.roi_head.mask_head.num_classes = 2
    torch.manual_seed(0)
    model = MODELS.build(model)
    model.init_weights()
    return model.train()


def test_losses_and_gradients_are_finite(detector: torch.nn.Module, tmp_path: Path) -> None:
    make_coco(tmp_path / 'set', 2)
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
        dict(type='Resize', scale=(96, 72), keep_ratio=True),
        dict(type='RandomFlip', prob=1.0),
        dict(type='PackDetInputs'),
    ]

    def check(chosen: list[str]) -> None:
        content = coco(2)
        for ann, name in zip(content['annotations'], chosen, strict=True):
            ODD[name](ann)
        write(tmp_path / 'set', content)
        dataset = DATASETS.build(
            dict(coco_dataset(tmp_path / 'set'), pipeline=pipeline, serialize_data=False)
        )
        batch = detector.data_preprocessor(pseudo_collate([dataset[0], dataset[1]]), training=True)
        loss, logged = detector.parse_losses(detector(**batch, mode='loss'))
        assert all(torch.as_tensor(value).isfinite().all() for value in logged.values()), logged
        detector.zero_grad()
        loss.backward()
        grads = {n: p.grad for n, p in detector.named_parameters() if p.grad is not None}
        assert not [name for name, grad in grads.items() if not grad.isfinite().all()]

    names = st.sampled_from(sorted(ODD))
    run_cases(st.lists(names, min_size=4, max_size=4), check, 24)
    # No box at all in either image.
    check(['gone', 'zero width', 'ignored', 'outside, right'])
