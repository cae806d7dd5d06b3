# Mask R-CNN, softmax ViT-B with ViT-Adapter, COCO 1333×800, 1x (vision-ttt Tab. 2 and App. D).
# The result printed there: box AP 46.8.
# T⁵'s body with the softmax put back: timm's DeiT without its class token.
_base_ = './_base_/maskrcnn_vit_adapter_b_1x.py'

model = dict(
    backbone=dict(
        backbone=dict(
            type='mmvttt.T5',
            mixer=dict(inner=dict(type='SoftmaxAttention'), key_norm=None, locality=None),
            init_cfg=dict(
                type='mmvttt.InheritViT', checkpoint='timm://deit_base_patch16_224.fb_in1k'
            ),
        )
    )
)
