# DiT⁵ (t5 Sec. 5.2): DiT with T⁵'s two-layer mixer and a window of 5, for latents of 256×256 images
# of 1000 classes; DiT's noise and loss. The scale and offset (qk_affine) are in the authors' code.
_base_ = './dit3.py'

model = dict(
    transformer=dict(
        cpe=False,
        mixer=dict(
            type='mmvttt.TTTMixer',
            inner=dict(type='MLP'),
            loss='l2',
            key_norm='instance',
            locality='dwc_qk',
            neighborhood=5,
            qk_affine=True,
        ),
    )
)
