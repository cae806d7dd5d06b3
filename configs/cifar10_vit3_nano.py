# The same with ViT³.
_base_ = './_base_/cifar10_nano.py'

model = dict(
    backbone=dict(
        type='mmvttt.ViT3',
        arch=dict(embed_dims=96, num_layers=6, num_heads=3, feedforward_channels=384),
    )
)
