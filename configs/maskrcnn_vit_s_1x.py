# Mask R-CNN, softmax ViT-S with ViT-Adapter, COCO 1333×800, 1x (vision-ttt Tab. 2 and App. D).
# The result printed there: box AP 44.9.
# T⁵'s body with the softmax put back: timm's DeiT without its class token.
_base_ = './_base_/maskrcnn_vit_adapter_s_1x.py'

model = dict(
    backbone=dict(
        backbone=dict(
            type='mmvttt.T5',
            mixer=dict(inner=dict(type='SoftmaxAttention'), key_norm=None, locality=None),
            init_cfg=dict(
                type='mmvttt.InheritViT', checkpoint='timm://deit_small_patch16_224.fb_in1k'
            ),
        )
    )
)
