# 20 epochs of AdamW for a classifier that starts from trained weights: a low rate, lower still in
# early layers, 500 steps of warm-up under a cosine; any max_epochs will do. No published
# recipe: usual values, to be tuned.
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=20)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

optim_wrapper = dict(
    type='OptimWrapper',
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.75),
    optimizer=dict(type='AdamW', lr=2e-4, weight_decay=0.05),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=500),
    # Without T_max and end: as long as the training.
    dict(type='CosineAnnealingLR', convert_to_iter_based=True),
]
# The rate is meant for 256 images a step: --auto-scale-lr.
auto_scale_lr = dict(base_batch_size=256)

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
