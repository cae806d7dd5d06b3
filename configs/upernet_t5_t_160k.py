# UperNet, T⁵-T with ViT-Adapter, ADE20K 512×512, 160k iterations. No paper has it.
_base_ = './_base_/upernet_vit_adapter_t_160k.py'

model = dict(
    backbone=dict(
        backbone=dict(
            type='mmvttt.T5',
            init_cfg=dict(
                type='mmvttt.InheritViT', checkpoint='timm://deit_tiny_patch16_224.fb_in1k'
            ),
        )
    )
)
