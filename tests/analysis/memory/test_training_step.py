"""Inputs of a training step for each kind of model, and the memory that the step holds."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mmvttt.analysis.memory.track import ACTIVATIONS
from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.memory import report as memory
from mmvttt.openmmlab.analysis.memory.report import memory_use, track
from mmvttt.openmmlab.analysis.memory.training_step import TrainingStep
from mmvttt.openmmlab.analysis.models import FoundModel, find_model
from mmvttt.openmmlab.config import load_config

from ...configs.reduced import build, reduce_model
from .reduced import FLOAT, SIZE, reduced, step_of


def test_a_segmentor_sees_several_classes() -> None:
    (sample, _) = step_of('upernet_vit3_t_160k', dry=True).samples
    assert sample.gt_sem_seg.data.unique().tolist() == list(range(8))


def test_images_have_the_channels_of_the_backbone() -> None:
    name = 'upernet_vit3_t_160k'
    four = {'model.backbone.backbone.in_channels': 4}
    flat = {'mean': None, 'std': None, 'bgr_to_rgb': False}
    fits = four | {f'model.data_preprocessor.{key}': value for key, value in flat.items()}
    step = TrainingStep(find_model(reduced(name), fits, weightless=True), 1, SIZE)
    assert [image.shape[1] for image in step.images] == [4]
    with pytest.raises(UsageError, match=f'{name} fails on images of 4 channels'):
        TrainingStep(find_model(reduced(name), four, weightless=True), 1, SIZE)
    found = find_model(reduced('maskrcnn_hvit3_t_1x'), {'model.backbone.in_channels': 4}, True)
    with pytest.raises(UsageError, match=r'keeps 3 of the 4 channels .* leave bgr_to_rgb out'):
        TrainingStep(found, 1, SIZE)


def test_images_are_as_large_as_they_are_padded() -> None:
    name = 'mask2former_hvit3_t_1x'
    cfg = reduce_model(load_config(name))
    model = build(cfg)
    assert memory._padded_size(model) == SIZE
    assert memory._padded_size(find_model('vittt_t_in1k', weightless=True).model) is None
    with pytest.raises(UsageError, match=f'data_preprocessor of {name} fails on images .* 30×150'):
        TrainingStep(FoundModel(name, model, SIZE, cfg), 1, (30, 150))


def test_optimizer_and_averaged_copies() -> None:
    mesa = memory_use(reduced('hvit3_t_mesa_in1k'), 2, SIZE)
    model = find_model(reduced('hvit3_t_mesa_in1k')).model
    trained = [p for p in model.parameters() if p.requires_grad]
    # AdamW: two fp32 numbers a parameter, and the number of its steps.
    assert mesa.optimizer == FLOAT * sum(2 * p.numel() + 1 for p in trained)
    assert mesa.gradients == FLOAT * sum(p.numel() for p in trained)
    # The teacher is a copy of the student, buffers too; the preprocessor's six numbers are not.
    assert mesa.average == mesa.weights - FLOAT * 6
    ema = memory_use(reduced('hvit3_t_in1k'), 2, SIZE)
    assert ema.average == ema.weights == mesa.weights


SELF_SUPERVISED = """
_base_ = 'mmpretrain::_base_/default_runtime.py'
views = [[dict(type='RandomResizedCrop', scale=64)], [dict(type='RandomResizedCrop', scale=32)]]
train_dataloader = dict(
    dataset=dict(
        type='RepeatDataset',
        dataset=dict(
            pipeline=[
                dict(type='LoadImageFromFile'),
                dict(type='MultiView', num_views=[2, 1], transforms=views),
                dict(type='PackInputs'),
            ]
        ),
    )
)
model = dict(
    type='SimSiam',
    data_preprocessor=dict(type='SelfSupDataPreprocessor'),
    backbone=dict(type='mmvttt.HViT3', arch=arch, out_indices=(3,)),
    neck=dict(type='NonLinearNeck', in_channels=64, hid_channels=8, out_channels=8),
    head=dict(
        type='LatentPredictHead',
        predictor=dict(
            type='NonLinearNeck', in_channels=8, hid_channels=8, out_channels=8,
            with_avg_pool=False),
        loss=dict(type='CosineSimilarityLoss'),
    ),
)
optim_wrapper = dict(optimizer=dict(type='AdamW'))
"""


def written(folder: Path, text: str) -> str:
    """A config with the small `arch` of a staged backbone."""
    arch = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))
    path = folder / 'own.py'
    path.write_text(f'arch = {arch}\n{text}')
    return str(path)


def test_a_self_supervised_model_sees_what_its_pipeline_makes(tmp_path: Path) -> None:
    name = written(tmp_path, SELF_SUPERVISED)
    step = TrainingStep(find_model(name), 3, SIZE, device=torch.device('cpu'))
    views = [(3, 3, 64, 64), (3, 3, 64, 64), (3, 3, 32, 32)]
    assert [view.shape for view in step.images] == views
    (real, *_), dry = track(step), memory_use(name, 3, SIZE)
    images = 'images, averaged copy'
    assert real[images] == dry.at_peak[images] == FLOAT * sum(map(np.prod, views))
    assert real[ACTIVATIONS] == dry.activations
    assert (dry.height, dry.width) == (64, 64)
    without = written(tmp_path, SELF_SUPERVISED + 'train_dataloader = None')
    with pytest.raises(UsageError, match=r'own learns from what its pipeline .* give it a train'):
        memory_use(without, 2, SIZE)
