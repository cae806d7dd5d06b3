# ddp.py with the BatchNorm statistics of rank 0 sent to all in each step, as the authors of ViT³ do
# on ImageNet (in detection and segmentation, mmengine's default: each rank keeps its own).
_base_ = './ddp.py'

model_wrapper_cfg = dict(broadcast_buffers=True)
