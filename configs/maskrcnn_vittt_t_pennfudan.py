# Your own data, by the example of the Penn-Fudan pedestrians (100 + 30 photographs, one class).
#
# The images and annotations are looked for under $MMVTTT_DATA/pennfudan (default: data/pennfudan):
#   annotations/instances_{train,val}.json, train/*.jpg, val/*.jpg
# so that one variable moves them all:
#   MMVTTT_DATA=/mnt/sets python tools/train.py configs/maskrcnn_vittt_t_pennfudan.py
#
# To train on a set of yours (any COCO-format instance segmentation), copy this file and change
#   1. `data_root` and, where they differ, the names of the folders and annotation files;
#   2. `classes`: the names in the annotation file's `categories`, in its order. A name that is not
#      there is the usual reason for an AP of 0. One class is a tuple too: ('person',);
#   3. `short_side` and `long_side`: pixels after resizing; cost grows with their product;
#   4. `max_epochs`: a few thousand steps for a set of this size, fewer from trained weights.
_base_ = [
    './_base_/maskrcnn_vit_adapter.py',
    './_base_/adamw_cosine.py',
    'mmdet::_base_/datasets/coco_instance.py',
    './_base_/tta_det.py',
    'mmdet::_base_/default_runtime.py',
]

data_root = '{{$MMVTTT_DATA:data}}/pennfudan/'
classes = ('person',)
short_side, long_side = 320, 480
max_epochs = 24

train_pipeline = _base_.train_pipeline
train_pipeline[2].scale = (long_side, short_side)
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = (long_side, short_side)
tta_pipeline = _base_.tta_pipeline
tta_pipeline[1].transforms[0][0].scale = (long_side, short_side)

train_dataloader = dict(
    batch_size=2,
    dataset=dict(
        data_root=data_root,
        metainfo=dict(classes=classes),
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        metainfo=dict(classes=classes),
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
        # Batches are small: no statistics of a batch.
        norm_cfg=dict(type='GN', num_groups=32),
        backbone=dict(type='mmvttt.Vittt', arch='tiny', drop_path_rate=0.1),
    ),
    neck=dict(in_channels=[192] * 4),
    roi_head=dict(
        bbox_head=dict(num_classes=len(classes)),
        mask_head=dict(num_classes=len(classes)),
    ),
    # A few persons an image: COCO's 512 boxes would be background, and half of the work.
    train_cfg=dict(rcnn=dict(sampler=dict(num=128))),
)

train_cfg = dict(max_epochs=max_epochs, val_interval=4)
# From ImageNet weights: inherit ./_base_/adamw_1x.py instead, whose layer decay spares them.
optim_wrapper = dict(optimizer=dict(lr=2e-4))
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs

default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(interval=4, max_keep_ckpts=2),
)
log_processor = dict(window_size=10)
