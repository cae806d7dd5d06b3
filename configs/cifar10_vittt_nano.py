# Vittt of 0.85M parameters on CIFAR-10: docs/results.md has what was trained, for fewer epochs.
#   python tools/train.py configs/cifar10_vittt_nano.py
_base_ = './_base_/cifar10_nano.py'

model = dict(
    backbone=dict(
        type='mmvttt.Vittt',
        arch=dict(embed_dims=96, num_layers=6, num_heads=3, feedforward_channels=256),
    )
)
