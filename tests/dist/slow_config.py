# The small model, for a minute and more.
_base_ = 'small_config.py'

train_cfg = dict(max_epochs=100)
custom_hooks = [*_base_.custom_hooks, dict(type='Slow')]
default_hooks = dict(checkpoint=dict(interval=100))
