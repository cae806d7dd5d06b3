# UperNet, ViT³-T with ViT-Adapter, ADE20K 512×512, 160k iterations (vision-ttt Tab. 2, App. D).
# The result printed there: mIoU 43.6.
_base_ = './_base_/upernet_vit_adapter_t_160k.py'

model = dict(
    backbone=dict(
        backbone=dict(
            type='mmvttt.ViT3',
            init_cfg=dict(type='Pretrained', checkpoint='mmvttt://vit3_t_in1k'),
        )
    )
)
