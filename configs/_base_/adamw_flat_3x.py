# 36 epochs of AdamW as in adamw_flat_1x.py, steps after epochs 27 and 33.
_base_ = './adamw_flat_1x.py'

train_cfg = dict(max_epochs=36)
param_scheduler = _base_.param_scheduler
param_scheduler[1].update(end=36, milestones=[27, 33])
