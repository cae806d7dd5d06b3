# Trains a Vittt of two blocks for 2 epochs of 4 steps with 4 images each: 2 ranks of 2.
# Layer-wise rates, no decay of what is flat, and clipped gradients: what shards could get wrong.
_base_ = '../../configs/_base_/ddp.py'

custom_imports = dict(imports=['small', 'small_images'])
default_scope = 'mmpretrain'
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='ClsDataPreprocessor', num_classes=3, mean=[128.0] * 3, std=[64.0] * 3
    ),
    backbone=dict(
        type='mmvttt.Vittt',
        arch=dict(embed_dims=48, num_layers=2, num_heads=2, feedforward_channels=64),
        out_type='avg_featmap',
        img_size=32,
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=3,
        in_channels=48,
        loss=dict(type='CrossEntropyLoss'),
    ),
)
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='SmallImages'),
)
val_dataloader = {**train_dataloader, 'sampler': dict(type='DefaultSampler', shuffle=False)}
val_evaluator = dict(type='Accuracy')
train_cfg = dict(by_epoch=True, max_epochs=2, val_interval=2)
val_cfg = dict()
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=0.003, weight_decay=0.05),
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.75),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=8)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=1), checkpoint=dict(type='CheckpointHook', interval=1)
)
custom_hooks = [dict(type='Keep')]
env_cfg = dict(dist_cfg=dict(backend='nccl'))
randomness = dict(seed=0)
