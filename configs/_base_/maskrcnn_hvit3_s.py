# Mask R-CNN with FPN on H-ViT³-S.
_base_ = './maskrcnn_hvit3.py'

model = dict(
    backbone=dict(
        arch='small',
        init_cfg=dict(type='Pretrained', checkpoint='mmvttt://hvit3_s_mesa_in1k'),
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
