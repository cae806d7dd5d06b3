# Two ranks with data workers, BatchNorm, pictures, an average, a best checkpoint; see test_night.
_base_ = ['../trainings/noisy_config.py']
custom_imports = dict(imports=['noisy', 'night'])
model = dict(seconds=0.05)
train_dataloader = dict(num_workers=2, dataset=dict(type='NoisyPictures'))
val_dataloader = dict(num_workers=1)
default_hooks = dict(
    checkpoint=dict(
        by_epoch=False, interval=5, max_keep_ckpts=2, save_best='mse', rule='less', exit_code=143
    )
)
custom_hooks = [dict(type='EMAHook', momentum=0.1), dict(type='FullDisk')]
randomness = dict(seed=0)
