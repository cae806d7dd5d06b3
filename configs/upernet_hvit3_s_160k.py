# UperNet, H-ViT³-S, ADE20K (vit3 Sec. 5.3, Tab. 9); 512×512, 160k iterations as the authors' code.
# The paper's result: mIoU 50.2.
_base_ = [
    './_base_/upernet_hvit3.py',
    './_base_/ade20k.py',
    './_base_/adamw_flat_160k.py',
    'mmseg::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        arch='small',
        drop_path_rate=0.4,
        init_cfg=dict(type='Pretrained', checkpoint='mmvttt://hvit3_s_mesa_in1k'),
    ),
    decode_head=dict(in_channels=[64, 128, 320, 512]),
    auxiliary_head=dict(in_channels=320),
)
