# DiT³ on scikit-learn's 1797 handwritten digits, 8×8, in pixels: minutes on two CPU cores.
# Rectified flow, the model predicts the image: see docs/generation.md for what else was tried.
#   python tools/train.py configs/dit3_digits.py
#   python tools/generate.py configs/dit3_digits.py work_dirs/dit3_digits/iter_2000.pth \
#       --classes all --count 100 --steps 20 --out work_dirs/dit3_digits/digits.png
_base_ = './_base_/diffusion_runtime.py'

max_iters = 2000

model = dict(
    type='mmvttt.DiffusionModel',
    transformer=dict(
        type='mmvttt.DiT3',
        arch=dict(embed_dims=64, num_layers=4, num_heads=2),
        patch_size=2,
        sample_size=8,
        in_channels=1,
        out_channels=1,
        num_classes=10,
    ),
    scheduler=dict(type='diffusers.FlowMatchEulerDiscreteScheduler'),
    loss=dict(
        type='mmvttt.FlowLoss',
        prediction='sample',
        logit_mean=0.3,
        logit_std=1.2,
        weighting='clamped',
    ),
    test_cfg=dict(steps=20),
)

train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    drop_last=True,
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='mmvttt.TinyDigits'),
)
val_dataloader = dict(
    batch_size=100,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(type='mmvttt.TinyDigits', split='test'),
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='default_collate'),
)
val_cfg = dict(type='ValLoop')
val_evaluator = dict(type='mmvttt.DigitQuality')
test_dataloader = val_dataloader
test_cfg = dict(type='TestLoop')
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='AdamW', lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
)
param_scheduler = [
    dict(type='CosineAnnealingLR', T_max=max_iters, eta_min_ratio=0.02, by_epoch=False)
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
# A short training: the average of about the last two hundred steps.
custom_hooks = [dict(type='EMAHook', momentum=0.005, priority='ABOVE_NORMAL')]
default_hooks = dict(checkpoint=dict(interval=500))
randomness = dict(seed=0)
