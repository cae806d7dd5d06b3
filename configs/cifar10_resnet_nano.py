# A ResNet-18 for 32×32 pixels, as thin as cifar10_vittt_nano.py is cheap.
_base_ = './_base_/cifar10_nano.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='ResNet_CIFAR',
        depth=18,
        stem_channels=20,
        base_channels=20,
        out_indices=(3,),
        style='pytorch',
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(in_channels=160),
)

# As for the transformers, norms and biases are not decayed.
optim_wrapper = dict(
    constructor='DefaultOptimWrapperConstructor',
    paramwise_cfg=dict(_delete_=True, norm_decay_mult=0.0, bias_decay_mult=0.0),
)
