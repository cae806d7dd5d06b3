# UperNet, H-ViT³-T, ADE20K (vit3 Sec. 5.3, Tab. 9); 512×512, 160k iterations as the authors' code.
# The paper's result: mIoU 48.0.
_base_ = './upernet_hvit3_s_160k.py'

model = dict(
    backbone=dict(
        arch='tiny',
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint='mmvttt://hvit3_t_mesa_in1k'),
    )
)

# Only this one of the three sizes was trained in mixed precision.
optim_wrapper = dict(type='mmvttt.AmpOptimWrapper')
