# UperNet, T⁵-T with ViT-Adapter, ADE20K 512×512, 160k iterations. No paper has it.
# Start from a T⁵ that was fine-tuned on ImageNet with
#   --cfg-options model.backbone.backbone.init_cfg.type=Pretrained \
#     model.backbone.backbone.init_cfg.checkpoint=t5_t_in1k_30e.pth \
#     model.backbone.backbone.init_cfg.prefix=backbone.
# or inherit a DeiT at once: type=mmvttt.InheritViT, checkpoint=DEIT (docs/t5.md).
_base_ = [
    './_base_/upernet_vit_adapter.py',
    './_base_/ade20k.py',
    './_base_/adamw_160k.py',
    'mmseg::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        drop_path_rate=0.1,
        backbone=dict(type='mmvttt.T5', arch='tiny', drop_path_rate=0.1),
    ),
    decode_head=dict(in_channels=[192] * 4, num_classes=150),
    auxiliary_head=dict(in_channels=192, num_classes=150),
)

optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=0.95),
    optimizer=dict(lr=12e-5),
)
