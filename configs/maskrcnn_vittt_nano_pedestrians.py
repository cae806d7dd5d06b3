# The detector behind `mmvttt predict pedestrians`: people and cars in photographs. Its anchors have
# common shapes, so that it is also what `mmvttt finetune` starts from. Trained with --amp on
# Penn-Fudan, CamVid and pictures of neither, which the model card beside the weights describes.
_base_ = './maskrcnn_vittt_nano_pennfudan.py'

data_root = '{{$MMVTTT_DATA:data}}/streets/'
metainfo = dict(classes=('person', 'car'), palette=[(220, 20, 60), (0, 0, 142)])
image_size = (480, 384)
crop_size = (320, 320)
max_epochs = 30

photograph_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomResize', scale=image_size, ratio_range=(0.7, 1.3), keep_ratio=True),
    # A crop without people is one more picture of what is not a person.
    dict(type='RandomCrop', crop_size=crop_size, allow_negative_crop=True),
    dict(type='FilterAnnotations', min_gt_bbox_wh=(8, 8), keep_empty=False),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='Pad', size=crop_size, pad_val=dict(img=(114, 114, 114))),
]
train_pipeline = [
    dict(type='CopyPaste', max_num_pasted=3),
    dict(type='PackDetInputs'),
]
photographs = _base_.train_dataloader.dataset
photographs.update(
    data_root=data_root,
    metainfo=metainfo,
    filter_cfg=dict(filter_empty_gt=False),
    pipeline=photograph_pipeline,
)
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = image_size
tta_pipeline = _base_.tta_pipeline
tta_pipeline[1].transforms[0][0].scale = image_size

train_dataloader = dict(
    dataset=dict(
        _delete_=True, type='MultiImageMixDataset', dataset=photographs, pipeline=train_pipeline
    )
)
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator

roi_layer = dict(sampling_ratio=2)
# People in a crowd that nobody has outlined one by one teach nothing.
assigner = dict(ignore_iof_thr=0.5)
model = dict(
    backbone=dict(backbone=dict(img_size=image_size[::-1])),
    rpn_head=dict(anchor_generator=dict(ratios=[0.5, 1.0, 2.0, 4.0])),
    roi_head=dict(
        bbox_roi_extractor=dict(roi_layer=roi_layer),
        mask_roi_extractor=dict(roi_layer=roi_layer),
        bbox_head=dict(num_classes=2),
        mask_head=dict(num_convs=2, conv_out_channels=64, num_classes=2),
    ),
    train_cfg=dict(
        rpn=dict(assigner=assigner),
        rcnn=dict(assigner=assigner, sampler=dict(num=64, pos_fraction=0.25)),
    ),
    test_cfg=dict(rpn=dict(max_per_img=100)),
)

train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs
default_hooks = dict(checkpoint=dict(interval=5))
