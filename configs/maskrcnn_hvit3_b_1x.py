# Mask R-CNN, H-ViT³-B, COCO multi-scale with crops, 1x (vit3 Sec. 5.2, Tab. 8).
# The paper's result: box AP 50.0, mask AP 44.6.
_base_ = [
    './_base_/maskrcnn_hvit3_b.py',
    './_base_/coco_multiscale_crop.py',
    './_base_/adamw_flat_1x.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(backbone=dict(drop_path_rate=0.1))
