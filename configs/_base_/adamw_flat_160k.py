# 160k iterations of AdamW, the same rate in all layers, no decay on norms; 16 images a step.
_base_ = './adamw_160k.py'

optim_wrapper = dict(
    constructor='DefaultOptimWrapperConstructor',
    paramwise_cfg=dict(_delete_=True, norm_decay_mult=0.0),
)
