# H-ViT³-T with MESA on ImageNet-1k, 224×224, 300 epochs (vit3 Sec. 5.1, Tab. 5).
# The paper's result: Top-1 84.0.
_base_ = './hvit3_t_in1k.py'

model = dict(type='mmvttt.MESAClassifier', mesa_weight=1.0)

# The teacher teaches from a quarter of the epochs on.
custom_hooks = [dict(type='mmvttt.MESAHook')]
