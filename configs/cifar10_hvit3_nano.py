# The same with H-ViT³, whose four stages have 64, 16, 4 and 1 tokens.
_base_ = './_base_/cifar10_nano.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmvttt.HViT3',
        arch=dict(embed_dims=[64, 96, 128, 160], depths=[5, 3, 1, 1], num_heads=[2, 3, 4, 5]),
        out_type='avg_featmap',
    ),
    head=dict(in_channels=160),
)
