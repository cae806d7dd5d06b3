# H-ViT³-B with MESA on ImageNet-1k, 224×224, 300 epochs (vit3 Sec. 5.1, Tab. 5).
# The paper's result: Top-1 85.5, of the teacher: see hvit3_t_mesa_in1k.py.
_base_ = './hvit3_t_mesa_in1k.py'

model = dict(
    mesa_weight=2.0,
    backbone=dict(arch='base', drop_path_rate=0.6),
    head=dict(in_channels=640),
)
