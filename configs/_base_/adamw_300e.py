# 300 epochs of AdamW, 20 of warm-up, a cosine by steps; 1024 images a step (vision-ttt App. D).
# The appendix gives rate, decay, epochs and warm-up; first and last rate, clipping and what does
# not decay are Swin's (docs/fidelity.md).
_base_ = 'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py'

optim_wrapper = dict(
    # At a rate of 1 it is there for what must not decay: norms, biases, embeddings, vectors.
    constructor='mmvttt.LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(_delete_=True, layer_decay_rate=1.0),
    clip_grad=dict(max_norm=5.0),
)
# From a thousandth of the rate, up for a fifteenth of the run (20 of 300 epochs), to a hundredth.
param_scheduler = [dict(type='mmvttt.WarmupCosineLR', convert_to_iter_based=True)]
