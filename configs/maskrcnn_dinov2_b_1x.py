# Mask R-CNN, DINOv2-B (softmax) with ViT-Adapter, COCO 1333×800, 1x. No paper has it.
# Its patches of 14 pixels become 16, its 37×37 positions stay.
# maskrcnn_dinov2_b_linear_1x.py is its linear twin.
_base_ = './_base_/maskrcnn_vit_adapter_b_1x.py'

model = dict(
    backbone=dict(
        backbone=dict(
            _delete_=True,
            type='mmvttt.TimmViT',
            model='vit_base_patch14_reg4_dinov2',
            patch_size=16,
            img_size=592,
            drop_path_rate=0.3,
            init_cfg=dict(
                type='Pretrained',
                checkpoint='timm://vit_base_patch14_reg4_dinov2.lvd142m',
            ),
        ),
    ),
)
