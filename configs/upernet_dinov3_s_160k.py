# UperNet, DINOv3-S (softmax) with ViT-Adapter, ADE20K 512×512, 160k. No paper has it.
# upernet_dinov3_s_linear_160k.py is its linear twin.
_base_ = './_base_/upernet_vit_adapter_s_160k.py'

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
