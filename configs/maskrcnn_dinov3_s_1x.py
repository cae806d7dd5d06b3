# Mask R-CNN, DINOv3-S (softmax) with ViT-Adapter, COCO 1333×800, 1x. No paper has it.
# maskrcnn_dinov3_s_linear_1x.py is its linear twin.
_base_ = './_base_/maskrcnn_vit_adapter_s_1x.py'

model = dict(
    backbone=dict(
        backbone=dict(
            _delete_=True,
            type='mmvttt.TimmViT',
            model='vit_small_patch16_dinov3',
            drop_path_rate=0.2,
            init_cfg=dict(
                type='Pretrained',
                checkpoint='timm://vit_small_patch16_dinov3.lvd1689m',
            ),
        ),
    ),
)
