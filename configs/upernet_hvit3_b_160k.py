# UperNet, H-ViT³-B, ADE20K (vit3 Sec. 5.3, Tab. 9); 512×512, 160k iterations as the authors' code.
# The paper's result: mIoU 51.7.
_base_ = './upernet_hvit3_s_160k.py'

model = dict(
    backbone=dict(
        arch='base',
        drop_path_rate=0.5,
        init_cfg=dict(checkpoint='mmvttt://hvit3_b_mesa_in1k'),
    ),
    decode_head=dict(in_channels=[96, 192, 448, 640]),
    auxiliary_head=dict(in_channels=448),
)
