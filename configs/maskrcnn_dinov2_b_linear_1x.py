# Mask R-CNN, DINOv2-B, linearized, with ViT-Adapter, COCO 1333×800, 1x. No paper has it.
# New parameters learn at 20 times the rate (t5 Tab. 11).
_base_ = './maskrcnn_dinov2_b_1x.py'

model = dict(backbone=dict(backbone=dict(linearize=dict())))
optim_wrapper = dict(paramwise_cfg=dict(new_lr_mult=20.0))

# Blocks of a linearized ViT would be compiled for each size of image.
compile_blocks = False
