# 30 epochs of AdamW from inherited weights: 5 of warm-up, then a cosine (t5 Tab. 8).
# Parameters that the source lacks learn at 20 times the rate (Tab. 11). The authors' rate is 2e-5
# for 512 images a step; here it is that for 1024: on other numbers, train with --auto-scale-lr.
# The "freeze" rows of Tab. 1 train nothing else, by --cfg-options
#   model.backbone.only_new=True optim_wrapper.paramwise_cfg.custom_keys.head.lr_mult=0
_base_ = 'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py'

optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=1.0, new_lr_mult=20.0),
    optimizer=dict(type='AdamW', lr=4e-5, weight_decay=1e-8),
)
# Once an epoch, as the authors': the whole first epoch runs at the lowest rate.
param_scheduler = [dict(type='mmvttt.WarmupCosineLR', warmup_ratio=5 / 30)]
train_cfg = dict(max_epochs=30)
auto_scale_lr = dict(base_batch_size=1024)

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
