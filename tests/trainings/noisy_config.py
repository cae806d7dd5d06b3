# Trains the noisy model; the folder of noisy.py must be on PYTHONPATH. No seed: one is drawn.
_base_ = 'tiny_config.py'

custom_imports = dict(imports=['noisy'])
model = dict(type='NoisyModel')
train_dataloader = dict(drop_last=False, sampler=dict(seed=None), dataset=dict(type='NoisyData'))
val_dataloader = dict(dataset=dict(type='NoisyData'))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=3)
optim_wrapper = dict(optimizer=dict(lr=0.01))
param_scheduler = dict(
    _delete_=True, type='CosineAnnealingLR', T_max=3, by_epoch=True, convert_to_iter_based=True
)
custom_hooks = [dict(type='EMAHook', momentum=0.1)]
auto_scale_lr = None
randomness = dict(seed=None)
