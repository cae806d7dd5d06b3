# DINO, DINOv3-S, linearized, with ViT-Adapter, COCO, 12 epochs. As untrained as its softmax twin:
# there is no result.
# New parameters learn at 20 times the rate (t5 Tab. 11).
_base_ = './dino_dinov3_s_1x.py'

model = dict(backbone=dict(backbone=dict(linearize=dict())))
optim_wrapper = dict(paramwise_cfg=dict(new_lr_mult=20.0))

# Blocks of a linearized ViT would be compiled for each size of image.
compile_blocks = False
