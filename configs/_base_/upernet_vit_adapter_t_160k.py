# UperNet on ADE20K, 160k (vision-ttt App. D): a plain backbone of size T, its type to be named.
_base_ = './upernet_vit_adapter_s_160k.py'

model = dict(
    backbone=dict(backbone=dict(arch='tiny', drop_path_rate=0.1)),
    decode_head=dict(in_channels=[192] * 4),
    auxiliary_head=dict(in_channels=192),
)

optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=0.95),
    optimizer=dict(lr=12e-5),
)
