# Your own data, by the example of CamVid (123 + 51 street scenes of 480×360 pixels, 11 classes).
#
# The images and labels are looked for under $MMVTTT_DATA/camvid (default: data/camvid):
#   img_dir/{train,val}/*.jpg, ann_dir/{train,val}/*.png (one number a pixel, 255: not labelled)
# so that one variable moves them all:
#   MMVTTT_DATA=/mnt/sets python tools/train.py configs/upernet_vittt_t_camvid.py
#
# To train on a set of yours (one image and one label map for each scene), copy this file and change
#   1. `data_root`, the names of the folders, and the suffixes of the two kinds of files;
#   2. `classes`, in the order of the numbers in the label maps. Where 0 means "no class" and the
#      classes count from 1, set reduce_zero_label=True in the data sets and in LoadAnnotations;
#   3. `scale` and `crop_size`: pixels; cost grows with their product;
#   4. `max_epochs`: a few thousand steps for a set of this size, fewer from trained weights.
_base_ = [
    './_base_/upernet_vit_adapter.py',
    './_base_/adamw_cosine.py',
    'mmseg::_base_/datasets/cityscapes.py',
    'mmseg::_base_/default_runtime.py',
]

data_root = '{{$MMVTTT_DATA:data}}/camvid'
classes = (
    'sky',
    'building',
    'pole',
    'road',
    'pavement',
    'tree',
    'sign symbol',
    'fence',
    'car',
    'pedestrian',
    'bicyclist',
)
scale = (480, 360)
crop_size = (320, 320)
max_epochs = 100

train_pipeline = _base_.train_pipeline
train_pipeline[2].scale = scale
train_pipeline[3].crop_size = crop_size
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = scale

scenes = dict(
    type='BaseSegDataset',
    data_root=data_root,
    metainfo=dict(classes=classes),
    img_suffix='.jpg',
    seg_map_suffix='.png',
)
train_dataloader = dict(
    batch_size=4,
    sampler=dict(_delete_=True, type='DefaultSampler', shuffle=True),
    dataset=dict(
        _delete_=True,
        data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train'),
        pipeline=train_pipeline,
        **scenes,
    ),
)
val_dataloader = dict(
    num_workers=2,
    dataset=dict(
        _delete_=True,
        data_prefix=dict(img_path='img_dir/val', seg_map_path='ann_dir/val'),
        pipeline=test_pipeline,
        **scenes,
    ),
)
test_dataloader = val_dataloader

# Batches are small: no statistics of a batch.
norm_cfg = dict(type='GN', num_groups=32)
model = dict(
    data_preprocessor=dict(size=crop_size),
    backbone=dict(
        norm_cfg=norm_cfg,
        backbone=dict(type='mmvttt.Vittt', arch='tiny', drop_path_rate=0.1),
    ),
    decode_head=dict(
        in_channels=[192] * 4, channels=256, norm_cfg=norm_cfg, num_classes=len(classes)
    ),
    auxiliary_head=dict(in_channels=192, channels=128, norm_cfg=norm_cfg, num_classes=len(classes)),
    # Any size is one piece of work for this backbone.
    test_cfg=dict(_delete_=True, mode='whole'),
)

train_cfg = dict(max_epochs=max_epochs, val_interval=10)
# From ImageNet weights: inherit ./_base_/adamw_160k.py instead, whose layer decay spares them.
optim_wrapper = dict(optimizer=dict(lr=5e-4))
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs

default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10),
    checkpoint=dict(type='CheckpointHook', interval=10, max_keep_ckpts=2, save_best='mIoU'),
    visualization=dict(type='SegVisualizationHook'),
)
log_processor = dict(_delete_=True, window_size=10)
