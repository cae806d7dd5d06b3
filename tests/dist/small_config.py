# Trains the tiny model without batch statistics: 2 epochs of 4 steps on 4 ranks, a sample each.
_base_ = ['../trainings/tiny_config.py', '../../configs/_base_/ddp.py']

custom_imports = dict(imports=['tiny', 'small'])
model = dict(norm='LayerNorm')
train_dataloader = dict(batch_size=1)
default_hooks = dict(logger=dict(interval=1))
custom_hooks = [dict(type='Keep')]
