# Mask R-CNN, H-ViT³-T, COCO multi-scale with crops, 3x (vit3 Sec. 5.2, Tab. 8).
# The paper's result: box AP 48.9, mask AP 44.0.
# Start from ImageNet weights (public ones after tools/convert_checkpoint.py) with
#   --cfg-options model.backbone.init_cfg.type=Pretrained \
#     model.backbone.init_cfg.checkpoint=hvit3_t_in1k.pth \
#     model.backbone.init_cfg.prefix=backbone.
_base_ = [
    './_base_/maskrcnn_hvit3.py',
    './_base_/coco_multiscale_crop.py',
    './_base_/adamw_flat_3x.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(arch='tiny', drop_path_rate=0.3),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
