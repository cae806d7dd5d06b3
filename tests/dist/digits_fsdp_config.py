# The same, sharded, and with its blocks computed again in the backward pass.
_base_ = ['digits_config.py', '../../configs/_base_/fsdp.py']

model = dict(backbone=dict(with_cp=True, backbone=dict(with_cp=True)))
