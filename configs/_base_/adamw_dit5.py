# DiT's training, the new inner weights at twice the rate (t5 Sec. 5.2, Tab. 11).
_base_ = './adamw_dit.py'

optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'.mixer.inner.': dict(lr_mult=2.0)}),
)
