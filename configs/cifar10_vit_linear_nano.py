# The ViT of cifar10_vit_nano.py, whose weights come with the package, linearized as T⁵ and
# fine-tuned for a tenth of its 6248 steps (t5 Sec. 5.1).
#   python tools/train.py configs/cifar10_vit_linear_nano.py
_base_ = './cifar10_t5_nano.py'

max_iters = 625

load_from = 'mmvttt://cifar10_vit_nano'

optim_wrapper = dict(optimizer=dict(lr=5e-4), paramwise_cfg=dict(new_lr_mult=20.0))
train_cfg = dict(
    _delete_=True, type='IterBasedTrainLoop', max_iters=max_iters, val_interval=max_iters
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=max_iters // 10),
    dict(type='CosineAnnealingLR', T_max=max_iters, by_epoch=False),
]
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=max_iters))
log_processor = dict(by_epoch=False)
