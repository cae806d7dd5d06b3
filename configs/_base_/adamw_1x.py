# 12 epochs of AdamW with layer-wise learning rates, steps after epochs 8 and 11; 16 images a step.
# The appendix of Vision-TTT gives rate, decay, epochs and images; the layers' rates and the warm-up
# are Vision-RWKV's (docs/fidelity.md).
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.85),
    optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
)

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
