# Mask R-CNN with FPN on H-ViT³-T.
_base_ = './maskrcnn_hvit3_s.py'

model = dict(backbone=dict(arch='tiny', init_cfg=dict(checkpoint='mmvttt://hvit3_t_mesa_in1k')))
