# Mask R-CNN, H-ViT³-B, COCO multi-scale with crops, 3x (vit3 Sec. 5.2, Tab. 8).
# The paper's result: box AP 51.0, mask AP 45.3.
# Start from ImageNet weights (public ones after tools/convert_checkpoint.py) with
#   --cfg-options model.backbone.init_cfg.type=Pretrained \
#     model.backbone.init_cfg.checkpoint=hvit3_b_in1k.pth \
#     model.backbone.init_cfg.prefix=backbone.
_base_ = [
    './_base_/maskrcnn_hvit3.py',
    './_base_/coco_multiscale_crop.py',
    './_base_/adamw_flat_3x.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(arch='base', drop_path_rate=0.6),
    neck=dict(in_channels=[96, 192, 448, 640]),
)
