# Mask R-CNN, ViT³-B with ViT-Adapter, COCO 1333×800, 1x (vision-ttt Tab. 2 and App. D).
# The result printed there: box AP 47.4.
# Start from ImageNet weights (public ones after tools/convert_checkpoint.py) with
#   --cfg-options model.backbone.backbone.init_cfg.type=Pretrained \
#     model.backbone.backbone.init_cfg.checkpoint=vit3_b_in1k.pth \
#     model.backbone.backbone.init_cfg.prefix=backbone.
_base_ = [
    './_base_/maskrcnn_vit_adapter.py',
    './_base_/coco_multiscale.py',
    './_base_/adamw_1x.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        drop_path_rate=0.3,
        backbone=dict(type='mmvttt.ViT3', arch='base', drop_path_rate=0.3),
    ),
    neck=dict(in_channels=[768] * 4),
)
