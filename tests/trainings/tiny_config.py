# Trains the tiny model; the folder of tiny.py must be on PYTHONPATH.
custom_imports = dict(imports=['tiny'])
default_scope = 'mmengine'
model = dict(type='TinyModel')
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='DefaultSampler', shuffle=True, seed=0),
    dataset=dict(type='TinyData'),
)
val_dataloader = {**train_dataloader, 'sampler': dict(type='DefaultSampler', shuffle=False)}
test_dataloader = val_dataloader
val_evaluator = dict(type='TinyError')
test_evaluator = val_evaluator
train_cfg = dict(by_epoch=True, max_epochs=2, val_interval=1)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.05))
param_scheduler = dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=8)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=2), checkpoint=dict(type='CheckpointHook', interval=1)
)
auto_scale_lr = dict(base_batch_size=8)
randomness = dict(seed=0)
