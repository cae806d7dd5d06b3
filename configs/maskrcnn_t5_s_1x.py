# Mask R-CNN, T⁵-S with ViT-Adapter, COCO 1333×800, 1x. No paper has it.
_base_ = './_base_/maskrcnn_vit_adapter_s_1x.py'

model = dict(
    backbone=dict(
        backbone=dict(
            type='mmvttt.T5',
            init_cfg=dict(
                type='mmvttt.InheritViT', checkpoint='timm://deit_small_patch16_224.fb_in1k'
            ),
        )
    )
)
