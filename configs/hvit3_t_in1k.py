# H-ViT³-T on ImageNet-1k, 224×224, 300 epochs (vit3 Sec. 5.1, Tab. 5).
# The paper's result: Top-1 83.5.
_base_ = [
    './_base_/classifier_deit.py',
    './_base_/imagenet_deit.py',
    './_base_/adamw_300e_bs4096.py',
    './_base_/ema_bs4096.py',
    './_base_/classifier_runtime.py',
    './_base_/ddp_broadcast.py',
]

model = dict(
    backbone=dict(type='mmvttt.HViT3', arch='tiny', drop_path_rate=0.2),
    head=dict(in_channels=512),
)
