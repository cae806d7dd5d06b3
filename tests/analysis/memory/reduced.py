"""Configs made small enough to be run for real, and training steps of them."""

import copy
import functools

import torch

from mmvttt.analysis.memory import report as memory
from mmvttt.analysis.memory.report import MemoryUse, memory_use
from mmvttt.analysis.memory.training_step import TrainingStep
from mmvttt.analysis.models import find_model

FLOAT = 4
PLAIN = dict(_delete_=True, embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=96)
STAGES = dict(
    _delete_=True, embed_dims=(16, 32, 48, 64), depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4)
)
_DETECTOR = {
    'model.neck.out_channels': 16,
    'model.rpn_head.in_channels': 16,
    'model.rpn_head.feat_channels': 16,
    'model.roi_head.bbox_roi_extractor.out_channels': 16,
    'model.roi_head.bbox_head.in_channels': 16,
    'model.roi_head.bbox_head.fc_out_channels': 32,
    'model.roi_head.mask_roi_extractor.out_channels': 16,
    'model.roi_head.mask_head.in_channels': 16,
    'model.roi_head.mask_head.conv_out_channels': 16,
    'model.train_cfg.rcnn.sampler.num': 64,
}
_SEGMENTOR = {
    'model.decode_head.channels': 16,
    'model.auxiliary_head.channels': 16,
    'model.data_preprocessor.size': (64, 96),
}
# Configs made small enough to be run for real.
REDUCED = {
    'maskrcnn_vittt_t_1x': _DETECTOR
    | {
        'model.backbone.backbone.arch': PLAIN | {'num_layers': 2},
        'model.neck.in_channels': [64] * 4,
    },
    'maskrcnn_hvit3_t_1x': _DETECTOR
    | {'model.backbone.arch': STAGES, 'model.neck.in_channels': [16, 32, 48, 64]},
    'upernet_vit3_t_160k': _SEGMENTOR
    | {
        'model.backbone.backbone.arch': PLAIN,
        'model.decode_head.in_channels': [64] * 4,
        'model.auxiliary_head.in_channels': 64,
    },
    'hvit3_t_mesa_in1k': {'model.backbone.arch': STAGES, 'model.head.in_channels': 64},
}
SIZE = (64, 96)


def reduced(name: str) -> dict:
    """Options of a config; a copy, because merging takes the `_delete_` out of them."""
    return copy.deepcopy(REDUCED[name])


def step_of(name: str, dry: bool, with_cp: str = 'none', amp: str = 'none') -> TrainingStep:
    torch.manual_seed(0)
    found = find_model(name, reduced(name), weightless=dry)
    memory.set_checkpointing(found.model, with_cp)
    return TrainingStep(found, 2, SIZE, amp, None if dry else torch.device('cpu'))


@functools.cache
def use_of(name: str, with_cp: str) -> MemoryUse:
    return memory_use(name, 2, SIZE, 'none', with_cp, reduced(name))
