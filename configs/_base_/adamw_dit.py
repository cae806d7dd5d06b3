# DiT's training: AdamW, a constant rate, no decay, 256 images a step, an average of .9999 a step.
# In fp32 with products in TF32, as the authors of DiT, DiT³ and DiT⁵ train; --amp for bf16.
_base_ = './diffusion_runtime.py'

train_cfg = dict(max_iters=400_000)
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0),
)
auto_scale_lr = dict(base_batch_size=256)
custom_hooks = [
    dict(type='EMAHook', momentum=1e-4, priority='ABOVE_NORMAL'),
    dict(type='mmvttt.TF32Hook'),
]
