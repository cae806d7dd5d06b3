# Mask R-CNN, H-ViT³-T, COCO multi-scale with crops, 1x (vit3 Sec. 5.2, Tab. 8).
# The paper's result: box AP 47.3, mask AP 42.8.
_base_ = [
    './_base_/maskrcnn_hvit3_t.py',
    './_base_/coco_multiscale_crop.py',
    './_base_/adamw_flat_1x.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(backbone=dict(drop_path_rate=0.1))
