# T⁵-T on ImageNet-1k, 224×224, 30 epochs from the weights of a DeiT (t5 Sec. 5.1).
# Tab. 4, from a DeiT that its authors trained without class token.
# The paper's result: Top-1 71.19.
# Another source, such as timm://deit_tiny_patch16_224.fb_in1k, by --cfg-options:
#   model.backbone.init_cfg.checkpoint=FILE model.head.init_cfg.1.checkpoint=FILE
_base_ = [
    './_base_/classifier_deit_t.py',
    './_base_/imagenet_deit_repeated.py',
    './_base_/adamw_30e_inherit.py',
    './_base_/classifier_runtime.py',
]

deit = 'mmvttt://deit_t_in1k'
model = dict(
    backbone=dict(type='mmvttt.T5', init_cfg=dict(type='mmvttt.InheritViT', checkpoint=deit)),
    head=dict(
        init_cfg=[
            dict(type='TruncNormal', layer='Linear', std=0.02),
            dict(type='mmvttt.InheritViT', checkpoint=deit),
        ]
    ),
)
