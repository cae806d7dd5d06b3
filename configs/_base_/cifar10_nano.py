# A classifier of CIFAR-10 around a backbone of 6 blocks, 96 channels and 64 tokens; 20 epochs.
_base_ = ['./cifar10.py', './adamw_cosine.py', 'mmpretrain::_base_/default_runtime.py']

max_epochs = 20

model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        mean=[125.3, 123.0, 113.9], std=[63.0, 62.1, 66.7], to_rgb=True, num_classes=10
    ),
    backbone=dict(img_size=32, patch_size=4, out_type='avg_featmap'),
    head=dict(type='LinearClsHead', in_channels=96, num_classes=10),
)

optim_wrapper = dict(
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=1.0),
)
train_cfg = dict(max_epochs=max_epochs)
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = 1562
param_scheduler[1].T_max = max_epochs

default_hooks = dict(logger=dict(interval=50), checkpoint=dict(max_keep_ckpts=1))
log_processor = dict(window_size=50)
randomness = dict(seed=0)
