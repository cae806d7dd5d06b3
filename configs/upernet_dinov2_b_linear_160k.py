# UperNet, DINOv2-B, linearized, with ViT-Adapter, ADE20K 512×512, 160k. No paper has it.
# New parameters learn at 20 times the rate (t5 Tab. 11).
_base_ = './upernet_dinov2_b_160k.py'

model = dict(backbone=dict(backbone=dict(linearize=dict())))
optim_wrapper = dict(paramwise_cfg=dict(new_lr_mult=20.0))
