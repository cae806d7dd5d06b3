# DiT⁵: diffusers' DiT, linear, for latents of 256×256 images of 1000 classes; DiT's noise and loss.
_base_ = './dit3.py'

model = dict(
    transformer=dict(
        _delete_=True,
        type='mmvttt.LinearTransformer',
        source=dict(
            type='diffusers.DiTTransformer2DModel',
            in_channels=4,
            out_channels=8,
            patch_size=2,
            sample_size=32,
            norm_eps=1e-6,
        ),
        where='dit5',
        # With norm_eps, what makes it the published DiT.
        time_shift=0,
    )
)
