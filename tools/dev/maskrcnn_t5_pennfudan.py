# configs/maskrcnn_t5_t_1x.py in a reduced size on the Penn-Fudan pedestrians: minutes of CPU.
# docs/t5.md, "From inherited and from random weights", has the commands and what came out.
_base_ = '../../configs/maskrcnn_t5_t_1x.py'

data_root = '{{$MMVTTT_DATA:data}}/pennfudan/'
metainfo = dict(classes=('person',))
scale = (240, 160)
channels = 64
max_epochs = 16

train_pipeline = _base_.train_pipeline
train_pipeline[2] = dict(type='Resize', scale=scale, keep_ratio=True)
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = scale

train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator

model = dict(
    backbone=dict(
        interaction_indexes=[[0, 1], [2, 3]],
        num_extra_extractors=0,
        deform_ratio=0.5,
        conv_inplane=32,
        norm_cfg=dict(type='GN', num_groups=16),
        drop_path_rate=0.0,
        backbone=dict(
            # That of vit_on_camvid.py.
            arch=dict(
                _delete_=True,
                embed_dims=128,
                num_layers=4,
                num_heads=2,
                feedforward_channels=512,
            ),
            drop_path_rate=0.0,
        ),
    ),
    neck=dict(in_channels=[128] * 4, out_channels=channels),
    rpn_head=dict(in_channels=channels, feat_channels=channels),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=channels),
        bbox_head=dict(in_channels=channels, fc_out_channels=256, num_classes=1),
        mask_roi_extractor=dict(out_channels=channels),
        mask_head=dict(
            num_convs=2, in_channels=channels, conv_out_channels=channels, num_classes=1
        ),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=400, max_per_img=200),
        rcnn=dict(sampler=dict(num=48)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=400, max_per_img=100), rcnn=dict(max_per_img=20)),
)

# One rate for all: the adapter and the heads are random either way.
optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=1.0),
    optimizer=dict(lr=1e-3),
    clip_grad=dict(max_norm=5.0),
)
train_cfg = dict(max_epochs=max_epochs, val_interval=4)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(
    logger=dict(interval=25),
    checkpoint=dict(interval=4, max_keep_ckpts=1),
)
log_processor = dict(window_size=25)
randomness = dict(seed=0)
