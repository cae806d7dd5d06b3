# H-ViT³-B on ImageNet-1k, 224×224, 300 epochs (vit3 Sec. 5.1, Tab. 5).
# The paper's result: Top-1 84.9.
_base_ = './hvit3_t_in1k.py'

model = dict(backbone=dict(arch='base', drop_path_rate=0.6), head=dict(in_channels=640))
