# DeiT-III-S, linearized, on ImageNet-1k, 224×224, 30 epochs by T⁵'s recipe. No paper has it.
_base_ = [
    './_base_/classifier_deit.py',
    './_base_/imagenet_deit_repeated.py',
    './_base_/adamw_30e_inherit.py',
    './_base_/classifier_runtime.py',
]

deit = 'timm://deit3_small_patch16_224.fb_in1k'
model = dict(
    backbone=dict(
        type='mmvttt.TimmViT',
        model='deit3_small_patch16_224',
        linearize=dict(),
        out_type='cls_token',
        init_cfg=dict(type='Pretrained', checkpoint=deit),
    ),
    head=dict(
        in_channels=384,
        init_cfg=[
            dict(type='TruncNormal', layer='Linear', std=0.02),
            dict(type='mmvttt.InheritViT', checkpoint=deit),
        ],
    ),
)
