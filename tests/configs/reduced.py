"""Models of the configs and of the toolboxes, small enough for a test; batches of two images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config, ConfigDict
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData, PixelData
from mmpretrain.structures import DataSample
from mmseg.structures import SegDataSample
from torch import nn

from mmvttt.openmmlab.config import config_root
from mmvttt.openmmlab.registry import MODELS
from mmvttt.openmmlab.reliability.weights import remove_checkpoints

PLAIN = dict(embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=96)
TIMM = dict(embed_dim=64, depth=4, num_heads=2)
STAGES = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))
THIN = dict(
    type='ResNet', depth=18, base_channels=8, stem_channels=8, frozen_stages=-1, init_cfg=None
)
SIZE = (64, 96)


def reduce_backbone(backbone: ConfigDict) -> list[int]:
    """Shrinks a backbone of four maps, with norms for two small images; returns their channels."""
    if backbone.type == 'ResNet':
        backbone.update(THIN)
        return [8, 16, 32, 64]
    backbone.norm_cfg = dict(type='BN')
    last = backbone.get('interaction_indexes', [[3]])[-1][-1]
    if 'backbone' in backbone and backbone.backbone.type == 'mmvttt.TimmViT':
        backbone.backbone.model_options = dict(TIMM, depth=last + 1)
        return [TIMM['embed_dim']] * 4
    if 'backbone' in backbone:
        backbone.backbone.update(arch=dict(PLAIN, num_layers=last + 1))
        return [PLAIN['embed_dims']] * 4
    backbone.arch = STAGES
    return list(STAGES['embed_dims'])


def reduced(name: str) -> Config:
    """A config of ours with a small model."""
    return reduce_model(Config.fromfile(config_root() / f'{name}.py'))


def reduce_model(cfg: Config) -> Config:
    """Shrinks the model of a config in place: one layer a stack, few regions; random weights."""
    model = cfg.model
    remove_checkpoints(model)
    if cfg.default_scope == 'mmpretrain':
        _reduce_classifier(cfg)
        return cfg
    channels = reduce_backbone(model.backbone)
    if 'roi_head' in model:
        model.neck.update(in_channels=channels, out_channels=16)
        model.rpn_head.update(in_channels=16, feat_channels=16)
        roi = model.roi_head
        roi.bbox_roi_extractor.out_channels = 16
        roi.bbox_head.update(in_channels=16, fc_out_channels=32)
        if roi.get('mask_head'):
            roi.mask_roi_extractor.out_channels = 16
            roi.mask_head.update(in_channels=16, conv_out_channels=16)
        model.train_cfg.rcnn.sampler.num = 16
        for part in (model.train_cfg.rpn_proposal, model.test_cfg.rpn):
            part.max_per_img = 16
    elif 'encoder' in model:
        model.num_queries = 20
        model.neck.in_channels = channels[1:]
        model.encoder.num_layers = model.decoder.num_layers = 1
        if 'dn_cfg' in model:
            model.dn_cfg.group_cfg.num_dn_queries = 10
    elif model.get('decode_head', {}).get('type') == 'FPNHead':
        model.data_preprocessor.size, model.neck.in_channels = SIZE, channels
    elif 'auxiliary_head' in model:
        model.data_preprocessor.size = SIZE
        model.decode_head.in_channels, model.auxiliary_head.in_channels = channels, channels[2]
        for head in (model.decode_head, model.auxiliary_head):
            head.channels, head.norm_cfg = 32, dict(type='BN')
        if model.test_cfg.mode == 'slide':
            model.test_cfg.update(crop_size=(48, 48), stride=(32, 32))
    else:
        _reduce_mask2former(model, channels)
    return cfg


def _reduce_classifier(cfg: Config) -> None:
    backbone = cfg.model.backbone
    if backbone.type == 'mmvttt.TimmViT':
        backbone.model_options = TIMM
    else:
        stages = backbone.type == 'mmvttt.HViT3'
        backbone.update(dict(arch=STAGES) if stages else dict(arch=PLAIN, img_size=SIZE[0]))
    cfg.model.head.in_channels = 64
    if 'data_preprocessor' in cfg:
        cfg.model.data_preprocessor = cfg.data_preprocessor


def _reduce_mask2former(model: ConfigDict, channels: list[int]) -> None:
    segments = 'decode_head' in model
    head = model.decode_head if segments else model.panoptic_head
    head.update(in_channels=channels, num_queries=10)
    head.pixel_decoder.encoder.num_layers = 1
    head.transformer_decoder.num_layers = 2
    (head if segments else model).train_cfg.num_points = 64
    preprocessor = model.data_preprocessor
    (preprocessor if segments else preprocessor.batch_augments[0]).size = SIZE


def build(cfg: Config) -> nn.Module:
    """The model of a config, built in the scope of its toolbox, from the seed 0."""
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    return MODELS.build(cfg.model)


def save_random(cfg: Config, path: Path, classes: Sequence[str]) -> nn.Module:
    """Saves the model of a config, with the names of its classes, and returns it."""
    model = build(cfg)
    model.init_weights()
    meta = dict(dataset_meta=dict(classes=tuple(classes), palette=[]))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), path)
    return model.eval()


def batch_for(cfg: Config, size: tuple[int, int] = SIZE) -> dict:
    """A batch for the model of a config, with labels that it learns from."""
    kind = {'mmpretrain': _class, 'mmseg': _label_map, 'mmdet': _instances}[cfg.default_scope]
    channels = cfg.model.backbone.get('in_channels', 3)
    inputs = torch.randint(0, 255, (2, channels, *size), dtype=torch.uint8)
    samples = [kind(size, i) for i in range(2)]
    return dict(inputs=inputs if kind is _class else list(inputs), data_samples=samples)


def _class(size: tuple[int, int], number: int) -> DataSample:
    return DataSample().set_gt_label(number)


def _label_map(size: tuple[int, int], number: int) -> SegDataSample:
    sample = SegDataSample(metainfo=_meta(size))
    labels = torch.randint(0, 11, (1, *size))
    labels[:, :8] = 255
    sample.gt_sem_seg = PixelData(data=labels)
    return sample


def _instances(size: tuple[int, int], number: int) -> DetDataSample:
    boxes = torch.tensor([[4.0, 4, 40, 44], [30, 20, 90, 60]])
    masks = np.zeros((2, *size), np.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist(), strict=True):
        mask[y0:y1, x0:x1] = 1
    sample = DetDataSample(metainfo=_meta(size) | dict(img_id=0))
    labels = torch.zeros(2, dtype=torch.long)
    sample.gt_instances = InstanceData(bboxes=boxes, labels=labels, masks=BitmapMasks(masks, *size))
    return sample


def _meta(size: tuple[int, int]) -> dict:
    return dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1, 1))
