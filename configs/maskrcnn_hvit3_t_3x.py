# Mask R-CNN, H-ViT³-T, COCO multi-scale with crops, 3x (vit3 Sec. 5.2, Tab. 8).
# The paper's result: box AP 48.9, mask AP 44.0.
_base_ = [
    './_base_/maskrcnn_hvit3_t.py',
    './_base_/coco_multiscale_crop.py',
    './_base_/adamw_flat_3x.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(backbone=dict(drop_path_rate=0.3))
