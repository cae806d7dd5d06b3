# Mask R-CNN, H-ViT³-S, COCO multi-scale with crops, 1x (vit3 Sec. 5.2, Tab. 8).
# The paper's result: box AP 49.1, mask AP 44.1.
# Start from ImageNet weights (public ones after tools/convert_checkpoint.py) with
#   --cfg-options model.backbone.init_cfg.type=Pretrained \
#     model.backbone.init_cfg.checkpoint=hvit3_s_in1k.pth \
#     model.backbone.init_cfg.prefix=backbone.
_base_ = [
    './_base_/maskrcnn_hvit3.py',
    './_base_/coco_multiscale_crop.py',
    './_base_/adamw_flat_1x.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(arch='small', drop_path_rate=0.1),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
