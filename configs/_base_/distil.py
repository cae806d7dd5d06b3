# Distillation of a softmax ViT into its linearized twin, on pictures without labels.
# Any folder of pictures: --cfg-options train_dataloader.dataset.data_root=PICTURES
_base_ = 'mmpretrain::_base_/default_runtime.py'

max_iters = 10000

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=224, crop_ratio_range=(0.2, 1.0), interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    batch_size=64,
    num_workers=4,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='CustomDataset',
        data_root='{{$MMVTTT_DATA:data}}/pictures',
        with_label=False,
        pipeline=train_pipeline,
    ),
)

model = dict(
    type='mmvttt.Distil',
    backbone=dict(type='mmvttt.TimmViT', linearize=dict()),
    data_preprocessor=dict(
        type='mmpretrain.ClsDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
    ),
)

train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters)
# New parameters learn at 5 times the rate.
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=1.0, new_lr_mult=5.0),
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.0),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='mmvttt.WarmupCosineLR', warmup_ratio=0.05, by_epoch=False, end=max_iters)
]
# The first tenth trains single blocks, and in them what is new alone.
custom_hooks = [dict(type='mmvttt.BlockwiseHook', iters=max_iters // 10)]
find_unused_parameters = True
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=1000, max_keep_ckpts=2))
log_processor = dict(by_epoch=False)
