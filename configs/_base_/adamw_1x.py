# 12 epochs of AdamW with layer-wise learning rates, steps after epochs 8 and 11; 16 images a step.
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.85),
    optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
)
