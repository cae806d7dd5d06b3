# H-ViT³-S with MESA on ImageNet-1k, 224×224, 300 epochs (vit3 Sec. 5.1, Tab. 5).
# The paper's result: Top-1 84.9, of the teacher: see hvit3_t_mesa_in1k.py.
_base_ = './hvit3_t_mesa_in1k.py'

model = dict(
    mesa_weight=1.5,
    backbone=dict(arch='small', drop_path_rate=0.4),
)
