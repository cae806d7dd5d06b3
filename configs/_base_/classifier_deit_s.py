# The classifier of a plain backbone of size S.
_base_ = './classifier_deit.py'

model = dict(backbone=dict(arch='small'), head=dict(in_channels=384))
