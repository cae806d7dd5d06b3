# UperNet on ADE20K, 160k (vision-ttt App. D): a plain backbone of size B, its type to be named.
_base_ = './upernet_vit_adapter_s_160k.py'

model = dict(
    backbone=dict(backbone=dict(arch='base', drop_path_rate=0.3)),
    decode_head=dict(in_channels=[768] * 4),
    auxiliary_head=dict(in_channels=768),
)

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.8))
