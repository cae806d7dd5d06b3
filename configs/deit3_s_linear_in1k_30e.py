# DeiT-III-S, linearized, on ImageNet-1k, 224×224, 30 epochs by T⁵'s recipe. No paper has it.
#   python tools/inherit_weights.py timm://deit3_small_patch16_224.fb_in1k inherited.pth \
#       --model deit3_small_patch16_224
#   python tools/train.py configs/deit3_s_linear_in1k_30e.py --cfg-options load_from=inherited.pth
_base_ = [
    './_base_/classifier_deit.py',
    './_base_/imagenet_deit_repeated.py',
    './_base_/adamw_30e_inherit.py',
    './_base_/classifier_runtime.py',
]

model = dict(
    backbone=dict(
        type='mmvttt.TimmViT',
        model='deit3_small_patch16_224',
        linearize=dict(),
        out_type='cls_token',
    ),
    head=dict(in_channels=384),
)
