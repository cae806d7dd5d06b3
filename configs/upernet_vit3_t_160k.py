# UperNet, ViT³-T with ViT-Adapter, ADE20K 512×512, 160k iterations (vision-ttt Tab. 2, App. D).
# The result printed there: mIoU 43.6.
# Start from ImageNet weights (public ones after tools/convert_checkpoint.py) with
#   --cfg-options model.backbone.backbone.init_cfg.type=Pretrained \
#     model.backbone.backbone.init_cfg.checkpoint=vit3_t_in1k.pth \
#     model.backbone.backbone.init_cfg.prefix=backbone.
_base_ = [
    './_base_/upernet_vit_adapter.py',
    './_base_/ade20k.py',
    './_base_/adamw_160k.py',
    'mmseg::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        drop_path_rate=0.1,
        backbone=dict(type='mmvttt.ViT3', arch='tiny', drop_path_rate=0.1),
    ),
    decode_head=dict(in_channels=[192] * 4, num_classes=150),
    auxiliary_head=dict(in_channels=192, num_classes=150),
)

optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=0.95),
    optimizer=dict(lr=12e-5),
)
