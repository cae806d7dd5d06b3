# The softmax twin of cifar10_vittt_nano.py: a ViT of timm without a class token.
_base_ = './_base_/cifar10_nano.py'

model = dict(
    backbone=dict(
        type='mmvttt.TimmViT',
        model='vit_tiny_patch16_224',
        model_options=dict(embed_dim=96, depth=6, num_heads=3, class_token=False),
    )
)
