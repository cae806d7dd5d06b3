# T⁵-S on ImageNet-1k, 224×224, 30 epochs from the weights of a DeiT (t5 Sec. 5.1).
# Tab. 4, from a DeiT that its authors trained without class token.
# The paper's result: Top-1 79.00.
#   python tools/inherit_weights.py DEIT inherited.pth
#   python tools/train.py configs/t5_s_in1k_30e.py --cfg-options load_from=inherited.pth
_base_ = [
    './_base_/classifier_deit_s.py',
    './_base_/imagenet_deit_repeated.py',
    './_base_/adamw_30e_inherit.py',
    './_base_/classifier_runtime.py',
]

model = dict(backbone=dict(type='mmvttt.T5'))
