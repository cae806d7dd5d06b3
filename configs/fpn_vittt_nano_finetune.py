# Semantic FPN on the backbone, adapter and FPN of the shipped detector of people and cars, by the
# example of CamVid: what `mmvttt finetune` trains for label maps without the weights of ADE20K.
_base_ = './upernet_vittt_nano_camvid.py'

weights = 'mmvttt://maskrcnn_vittt_nano_pedestrians'
channels = 64
crop_size = (160, 160)

model = dict(
    backbone=dict(
        task='det',
        init_cfg=dict(type='Pretrained', checkpoint=weights, prefix='backbone.'),
        interaction_indexes=[[0, 2], [3, 5]],
        norm_cfg=dict(_delete_=True, type='BN'),
        backbone=dict(init_cfg=None),
    ),
    neck=dict(
        type='FPN',
        in_channels=[96] * 4,
        out_channels=channels,
        num_outs=4,
        norm_cfg=dict(type='BN'),
        init_cfg=dict(type='Pretrained', checkpoint=weights, prefix='neck.'),
    ),
    # A head of half a million parameters learns from forty maps what UperNet's four million do not.
    decode_head=dict(
        _delete_=True,
        type='FPNHead',
        in_channels=[channels] * 4,
        in_index=[0, 1, 2, 3],
        feature_strides=[4, 8, 16, 32],
        channels=channels,
        dropout_ratio=0.1,
        num_classes=11,
        norm_cfg=dict(type='GN', num_groups=8),
        align_corners=False,
        loss_decode=dict(
            type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0, avg_non_ignore=True
        ),
    ),
    auxiliary_head=None,
)
