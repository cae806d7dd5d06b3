# The classifier of a plain backbone of size T.
_base_ = './classifier_deit.py'

model = dict(backbone=dict(arch='tiny'), head=dict(in_channels=192))
