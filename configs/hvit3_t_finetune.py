# H-ViT³-T, from its authors' weights for ImageNet-1k (MESA, top-1 84.0), on classes of your own, by
# the example of CIFAR-10 at 224×224. `mmvttt finetune` starts from it. Nobody has measured this
# schedule: tune its rate and its length.
_base_ = [
    './_base_/cifar10.py',
    './_base_/adamw_cosine.py',
    'mmpretrain::_base_/default_runtime.py',
]

load_from = 'mmvttt://hvit3_t_mesa_in1k'
max_epochs = 20

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=224),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=224),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True, num_classes=10
    ),
    # The stem keeps its BatchNorms' statistics: batches are small.
    backbone=dict(
        type='mmvttt.HViT3',
        arch='tiny',
        drop_path_rate=0.1,
        frozen_stages=0,
        out_type='avg_featmap',
    ),
    neck=None,
    head=dict(type='LinearClsHead', in_channels=512, num_classes=10),
)

train_cfg = dict(max_epochs=max_epochs)
# The heads, which have new classes, learn ten times as fast.
optim_wrapper = dict(
    optimizer=dict(lr=1e-4), paramwise_cfg=dict(custom_keys=dict(head=dict(lr_mult=10.0)))
)
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
