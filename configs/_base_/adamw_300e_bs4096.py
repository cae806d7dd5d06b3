# 300 epochs of AdamW as in adamw_300e.py, 4096 images a step, mixed precision (vit3 Sec. 5.1).
# The rate is scaled to the images that a step really has, as in the authors' code.
_base_ = './adamw_300e.py'

optim_wrapper = dict(type='mmvttt.AmpOptimWrapper', optimizer=dict(lr=4e-3))
auto_scale_lr = dict(enable=True, base_batch_size=4096)
