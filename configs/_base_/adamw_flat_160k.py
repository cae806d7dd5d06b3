# 160k iterations of AdamW, the same rate in all layers; 16 images a step. No decay on the norms of
# the backbone; the heads' norms decay, because the authors' rule misses their names.
_base_ = './adamw_160k.py'

optim_wrapper = dict(
    constructor='DefaultOptimWrapperConstructor',
    paramwise_cfg=dict(
        _delete_=True,
        norm_decay_mult=0.0,
        custom_keys=dict(decode_head=dict(decay_mult=1.0), auxiliary_head=dict(decay_mult=1.0)),
    ),
)
