# Mask R-CNN on COCO, 1x (vision-ttt App. D): a plain backbone of size T, its type to be named.
_base_ = './maskrcnn_vit_adapter_s_1x.py'

model = dict(
    backbone=dict(backbone=dict(arch='tiny', drop_path_rate=0.1)),
    neck=dict(in_channels=[192] * 4),
)
