# 12 epochs of AdamW, one rate for all layers, no decay on norms, mixed precision (vit3 Sec. 5.2).
# The authors write a rate of 2e-4 at 4 images a GPU and no number of GPUs; on 8, as their sister
# project (1e-4 at 2 a GPU), that is 32 images a step. The rate is scaled to the real number.
_base_ = './adamw_1x.py'

optim_wrapper = dict(
    type='mmvttt.AmpOptimWrapper',
    constructor='DefaultOptimWrapperConstructor',
    paramwise_cfg=dict(_delete_=True, norm_decay_mult=0.0),
    optimizer=dict(lr=2e-4),
)
param_scheduler = _base_.param_scheduler
param_scheduler[0].update(end=1000)
auto_scale_lr = dict(enable=True, base_batch_size=32)
