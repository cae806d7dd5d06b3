# The DiT of dit_digits.py made linear, and fine-tuned for a quarter of its steps (t5 Sec. 5.2).
# Without DiT⁵'s neighbourhood attention: on a map of 4×4 its window would be the whole map.
#   python tools/train.py configs/dit_digits.py
#   python tools/train.py configs/dit5_digits.py \
#       --cfg-options load_from=work_dirs/dit_digits/iter_2000.pth
_base_ = './dit3_digits.py'

max_iters = 500

model = dict(
    transformer=dict(
        cpe=False,
        mixer=dict(
            type='mmvttt.TTTMixer',
            inner=dict(type='MLP'),
            loss='l2',
            key_norm='instance',
            locality='dwc_qk',
        ),
    ),
)

optim_wrapper = dict(
    optimizer=dict(lr=1e-3),
    # Parameters that the source does not have.
    paramwise_cfg=dict(
        custom_keys={
            '.mixer.inner.': dict(lr_mult=5.0),
            '.mixer.q_conv.': dict(lr_mult=5.0),
            '.mixer.k_conv.': dict(lr_mult=5.0),
        }
    ),
)
param_scheduler = [
    dict(type='CosineAnnealingLR', T_max=max_iters, eta_min_ratio=0.02, by_epoch=False)
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
