# mmpretrain's runtime; of the checkpoints it keeps the last three and the best.
_base_ = 'mmpretrain::_base_/default_runtime.py'

default_hooks = dict(checkpoint=dict(max_keep_ckpts=3, save_best='auto'))
