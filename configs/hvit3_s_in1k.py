# H-ViT³-S on ImageNet-1k, 224×224, 300 epochs (vit3 Sec. 5.1, Tab. 5).
# The paper's result: Top-1 84.4.
_base_ = './hvit3_t_in1k.py'

model = dict(backbone=dict(arch='small', drop_path_rate=0.4))
