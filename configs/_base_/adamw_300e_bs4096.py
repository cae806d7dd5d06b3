# 300 epochs of AdamW as in adamw_300e.py, for 4096 images a step (vit3 Sec. 5.1).
# On fewer than 32 GPUs of 128 images, train with --auto-scale-lr.
_base_ = './adamw_300e.py'

optim_wrapper = dict(optimizer=dict(lr=4e-3))
auto_scale_lr = dict(base_batch_size=4096)
