# cifar10_vit_nano.py linearized as T⁵, from random weights.
_base_ = './cifar10_vit_nano.py'

model = dict(backbone=dict(linearize=dict()))
