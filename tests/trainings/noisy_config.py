# Trains the noisy model; the folder of noisy.py must be on PYTHONPATH. No seed: one is drawn.
custom_imports = dict(imports=['noisy'])
default_scope = 'mmengine'
model = dict(type='NoisyModel')
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    drop_last=False,
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='NoisyData'),
)
val_dataloader = dict(
    batch_size=4,
    num_workers=0,
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='NoisyData'),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='TinyError')
test_evaluator = val_evaluator
train_cfg = dict(by_epoch=True, max_epochs=3, val_interval=1)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01))
param_scheduler = dict(type='CosineAnnealingLR', T_max=3, by_epoch=True, convert_to_iter_based=True)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1))
custom_hooks = [dict(type='EMAHook', momentum=0.1)]
