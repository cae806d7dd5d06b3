# The classifier of a plain backbone of size B.
_base_ = './classifier_deit.py'

model = dict(backbone=dict(arch='base'), head=dict(in_channels=768))
