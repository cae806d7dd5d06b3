# Steps, not epochs: the log, and the last three checkpoints of a diffusion model.
train_cfg = dict(type='IterBasedTrainLoop')
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=50),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=10_000, max_keep_ckpts=3),
)
log_processor = dict(by_epoch=False)
env_cfg = dict(dist_cfg=dict(backend='nccl'))
default_scope = 'mmengine'
