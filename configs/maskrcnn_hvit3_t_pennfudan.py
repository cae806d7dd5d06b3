# Your own data with H-ViT³-T: see maskrcnn_vittt_t_pennfudan.py for what to change.
_base_ = './maskrcnn_vittt_t_pennfudan.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmvttt.HViT3',
        arch='tiny',
        drop_path_rate=0.1,
        norm_cfg=dict(type='GN', num_groups=32),
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
