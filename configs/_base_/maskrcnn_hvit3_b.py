# Mask R-CNN with FPN on H-ViT³-B.
_base_ = './maskrcnn_hvit3.py'

model = dict(
    backbone=dict(
        arch='base',
        init_cfg=dict(type='Pretrained', checkpoint='mmvttt://hvit3_b_mesa_in1k'),
    ),
    neck=dict(in_channels=[96, 192, 448, 640]),
)
