# The same with ViT³; its design space is one option away, see docs/own_config.md.
_base_ = './vittt_digits.py'

model = dict(backbone=dict(type='mmvttt.ViT3'))
