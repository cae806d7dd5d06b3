# UperNet, H-ViT³-T, ADE20K (vit3 Sec. 5.3, Tab. 9); 512×512, 160k iterations as the authors' code.
# The paper's result: mIoU 48.0.
_base_ = [
    './_base_/upernet_hvit3.py',
    './_base_/ade20k.py',
    './_base_/adamw_flat_160k.py',
    'mmseg::_base_/default_runtime.py',
]

model = dict(
    backbone=dict(arch='tiny', drop_path_rate=0.2),
    decode_head=dict(in_channels=[64, 128, 320, 512]),
    auxiliary_head=dict(in_channels=320),
)

# Only this one of the three sizes was trained in mixed precision.
optim_wrapper = dict(type='mmvttt.AmpOptimWrapper')
