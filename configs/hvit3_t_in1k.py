# H-ViT³-T on ImageNet-1k, 224×224, 300 epochs (vit3 Sec. 5.1, Tab. 5).
# The paper's result: Top-1 83.5.
_base_ = [
    './_base_/classifier_deit.py',
    './_base_/imagenet_deit.py',
    './_base_/adamw_300e_bs4096.py',
    './_base_/ema_bs4096.py',
    './_base_/classifier_runtime.py',
]

model = dict(
    backbone=dict(type='mmvttt.HViT3', arch='tiny', drop_path_rate=0.2),
    head=dict(in_channels=512),
)
# On several GPUs BatchNorm has the statistics of rank 0, as by the authors.
custom_hooks = [*_base_.custom_hooks, dict(type='mmvttt.BroadcastBuffersHook')]
