# Vittt-B on ImageNet-1k, 224×224, 300 epochs (vision-ttt Tab. 1, App. D).
# The paper's result: Top-1 82.7.
# Options: the class token of Tab. 4 (model.backbone.cls_mode), a moving average (_base_/ema.py).
_base_ = [
    './_base_/classifier_deit_b.py',
    './_base_/imagenet_deit.py',
    './_base_/adamw_300e.py',
    './_base_/classifier_runtime.py',
]

model = dict(backbone=dict(type='mmvttt.Vittt', drop_path_rate=0.1))
