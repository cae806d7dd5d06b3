# Parameters, gradients and the optimizer's state are sharded over the GPUs, for a model that
# one GPU cannot hold: add this file to the `_base_` of a config. Checkpoints are the usual ones.
runner_type = 'FlexibleRunner'
strategy = dict(
    type='mmvttt.BlockFSDPStrategy',
    model_wrapper=dict(
        type='MMFullyShardedDataParallel',
        # Gathered block by block: ours and timm's, or blocks=['package.module.Class'].
        auto_wrap_policy=dict(type='mmvttt.wrap_blocks'),
        # The next block is gathered while the gradients of one are computed.
        backward_prefetch='BACKWARD_PRE',
    ),
)
