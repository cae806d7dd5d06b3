# Mask R-CNN on COCO, 1x (vision-ttt App. D): a plain backbone of size B, its type to be named.
_base_ = './maskrcnn_vit_adapter_s_1x.py'

model = dict(
    backbone=dict(backbone=dict(arch='base', drop_path_rate=0.3)),
    neck=dict(in_channels=[768] * 4),
)
