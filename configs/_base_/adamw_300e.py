# 300 epochs of AdamW, 20 of warm-up, then a cosine; 1024 images a step (App. D; Swin's code).
_base_ = 'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py'

optim_wrapper = dict(
    # At a rate of 1 it is there for what must not decay: norms, biases, embeddings, vectors.
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(_delete_=True, layer_decay_rate=1.0),
    clip_grad=dict(max_norm=5.0),
)
