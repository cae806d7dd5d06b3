# The DiT of dit_digits.py made linear, and fine-tuned for a quarter of its steps (t5 Sec. 5.2).
# Without DiT⁵'s neighbourhood attention: on a map of 4×4 its window would be the whole map.
#   python tools/train.py configs/dit_digits.py
#   python tools/convert_checkpoint.py work_dirs/dit_digits/iter_2000.pth source.pth --to diffusers
#   python tools/train.py configs/dit5_digits.py --cfg-options load_from=source.pth
_base_ = './dit3_digits.py'

max_iters = 500

model = dict(
    transformer=dict(
        _delete_=True,
        type='mmvttt.LinearTransformer',
        source=dict(
            type='diffusers.DiTTransformer2DModel',
            num_attention_heads=2,
            attention_head_dim=32,
            num_layers=4,
            in_channels=1,
            out_channels=1,
            patch_size=2,
            sample_size=8,
            num_embeds_ada_norm=10,
            norm_eps=1e-6,
        ),
        where='dit5',
        time_shift=0,
        neighborhood=None,
        qk_affine=False,
    ),
)

optim_wrapper = dict(
    optimizer=dict(lr=1e-3),
    # Parameters that the source does not have.
    paramwise_cfg=dict(custom_keys={'.processor.': dict(lr_mult=5.0)}),
)
param_scheduler = [
    dict(type='CosineAnnealingLR', T_max=max_iters, eta_min_ratio=0.02, by_epoch=False)
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
