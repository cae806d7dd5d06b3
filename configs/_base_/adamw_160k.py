# 160k iterations of AdamW with layer-wise learning rates, falling linearly to 0; 16 images a step.
# The appendix of Vision-TTT gives rate, decay, steps and images; the layers' rates and the warm-up
# are Vision-RWKV's and the ViT-Adapter (docs/fidelity.md).
_base_ = 'mmseg::_base_/schedules/schedule_160k.py'

optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.85),
    optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.01),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, end=1500),
    dict(type='PolyLR', by_epoch=False, begin=1500, end=160000),
]
auto_scale_lr = dict(enable=False, base_batch_size=16)

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
