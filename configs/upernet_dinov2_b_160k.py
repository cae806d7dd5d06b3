# UperNet, DINOv2-B (softmax) with ViT-Adapter, ADE20K 512×512, 160k. No paper has it.
# Its patches of 14 pixels become 16, its 37×37 positions stay.
# upernet_dinov2_b_linear_160k.py is its linear twin.
_base_ = './_base_/upernet_vit_adapter_b_160k.py'

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
