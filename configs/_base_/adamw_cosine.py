# AdamW from random weights: warm-up, then a cosine down to 0 at the last step.
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=12)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=5.0),
)
# Change T_max together with max_epochs.
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=100),
    dict(type='CosineAnnealingLR', T_max=12, convert_to_iter_based=True),
]
