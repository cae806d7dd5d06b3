# ViT³-B on ImageNet-1k, 224×224, 300 epochs (vit3 Sec. 5.1, Tab. 7).
# The paper's result: Top-1 82.6.
_base_ = [
    './_base_/classifier_deit_b.py',
    './_base_/imagenet_deit.py',
    './_base_/adamw_300e_bs4096.py',
    './_base_/classifier_runtime.py',
]

model = dict(backbone=dict(type='mmvttt.ViT3', drop_path_rate=0.4))
