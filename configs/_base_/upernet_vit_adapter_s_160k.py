# UperNet on ADE20K, 160k (vision-ttt App. D): a plain backbone of size S, its type to be named.
_base_ = [
    './upernet_vit_adapter.py',
    './ade20k.py',
    './adamw_160k.py',
    'mmseg::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(backbone=dict(arch='small', drop_path_rate=0.2)),
    decode_head=dict(in_channels=[384] * 4),
    auxiliary_head=dict(in_channels=384),
)
