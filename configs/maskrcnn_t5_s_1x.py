# Mask R-CNN, T⁵-S with ViT-Adapter, COCO 1333×800, 1x. No paper has it.
# Start from a T⁵ that was fine-tuned on ImageNet with
#   --cfg-options model.backbone.backbone.init_cfg.type=Pretrained \
#     model.backbone.backbone.init_cfg.checkpoint=t5_s_in1k_30e.pth \
#     model.backbone.backbone.init_cfg.prefix=backbone.
# or inherit a DeiT at once: type=mmvttt.InheritViT, checkpoint=DEIT (docs/t5.md).
_base_ = [
    './_base_/maskrcnn_vit_adapter.py',
    './_base_/coco_multiscale.py',
    './_base_/adamw_1x.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        drop_path_rate=0.2,
        backbone=dict(type='mmvttt.T5', arch='small', drop_path_rate=0.2),
    ),
    neck=dict(in_channels=[384] * 4),
)
