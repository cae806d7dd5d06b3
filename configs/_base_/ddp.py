# One copy of the model on every GPU: add this file to the `_base_` of a config.
model_wrapper_cfg = dict(
    type='MMDistributedDataParallel',
    # Statistics are SyncBN's, or each process has its own: none to send around in every step.
    broadcast_buffers=False,
    # Gradients live in DDP's buckets, without a copy: saves what the parameters take.
    gradient_as_bucket_view=True,
    # Nothing is unused. Without it DDP rebuilds its buckets after the first step, also in a resumed
    # run: sums over three or more processes then differ in their last bits.
    find_unused_parameters=True,
)
