# UperNet, Vittt-S with ViT-Adapter, ADE20K 512×512, 160k iterations (vision-ttt Tab. 2, App. D).
# The paper's result: mIoU 48.4.
# Start from ImageNet weights with
#   --cfg-options model.backbone.backbone.init_cfg.type=Pretrained \
#     model.backbone.backbone.init_cfg.checkpoint=vittt_s_in1k.pth \
#     model.backbone.backbone.init_cfg.prefix=backbone.
_base_ = [
    './_base_/upernet_vit_adapter.py',
    './_base_/ade20k.py',
    './_base_/adamw_160k.py',
    'mmseg::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        drop_path_rate=0.2,
        backbone=dict(type='mmvttt.Vittt', arch='small', drop_path_rate=0.2),
    ),
    decode_head=dict(in_channels=[384] * 4, num_classes=150),
    auxiliary_head=dict(in_channels=384, num_classes=150),
)
