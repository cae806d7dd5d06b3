# Trains the small model for 2 epochs of 4 steps with 16 samples each: 4 ranks of 4.
_base_ = '../../configs/_base_/ddp.py'

custom_imports = dict(imports=['small'])
default_scope = 'mmengine'
model = dict(type='SmallModel')
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='SmallData'),
)
train_cfg = dict(by_epoch=True, max_epochs=2)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01))
param_scheduler = dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=8)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=1), checkpoint=dict(type='CheckpointHook', interval=1)
)
custom_hooks = [dict(type='Keep')]
auto_scale_lr = dict(base_batch_size=8)
randomness = dict(seed=0)
