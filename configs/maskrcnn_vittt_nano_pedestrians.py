# The detector behind `mmvttt predict pedestrians`: maskrcnn_vittt_nano_pennfudan with larger
# images, varied scales, crops and colours, people pasted from one photograph into another, and
# anchors as tall as people; trained with --amp.
_base_ = './maskrcnn_vittt_nano_pennfudan.py'

image_size = (480, 384)
crop_size = (320, 320)
max_epochs = 110

photograph_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomResize', scale=image_size, ratio_range=(0.7, 1.3), keep_ratio=True),
    dict(type='RandomCrop', crop_size=crop_size),
    dict(type='FilterAnnotations', min_gt_bbox_wh=(8, 8)),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='Pad', size=crop_size, pad_val=dict(img=(114, 114, 114))),
]
train_pipeline = [
    dict(type='CopyPaste', max_num_pasted=3),
    dict(type='PackDetInputs'),
]
photographs = _base_.train_dataloader.dataset
photographs.pipeline = photograph_pipeline
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = image_size
tta_pipeline = _base_.tta_pipeline
tta_pipeline[1].transforms[0][0].scale = image_size

train_dataloader = dict(
    dataset=dict(
        _delete_=True, type='MultiImageMixDataset', dataset=photographs, pipeline=train_pipeline
    )
)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

roi_layer = dict(sampling_ratio=2)
model = dict(
    backbone=dict(backbone=dict(img_size=image_size[::-1])),
    rpn_head=dict(anchor_generator=dict(ratios=[1.5, 2.5, 4.0])),
    roi_head=dict(
        bbox_roi_extractor=dict(roi_layer=roi_layer),
        mask_roi_extractor=dict(roi_layer=roi_layer),
        mask_head=dict(num_convs=2, conv_out_channels=64),
    ),
    train_cfg=dict(rcnn=dict(sampler=dict(num=64, pos_fraction=0.25))),
    test_cfg=dict(rpn=dict(max_per_img=100)),
)

train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs
default_hooks = dict(checkpoint=dict(interval=5))
