# UperNet, softmax ViT-S with ViT-Adapter, ADE20K 512×512, 160k iterations (vision-ttt Tab. 2).
# The result printed there: mIoU 46.2.
# T⁵'s body with the softmax put back: timm's DeiT without its class token.
_base_ = './_base_/upernet_vit_adapter_s_160k.py'

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
