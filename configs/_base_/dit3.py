# DiT³ for latents of 256×256 images of 1000 classes, with DiT's noise and loss.
model = dict(
    type='mmvttt.DiffusionModel',
    transformer=dict(type='mmvttt.DiT3', sample_size=32, in_channels=4, num_classes=1000),
    scheduler=dict(
        type='diffusers.DDPMScheduler',
        beta_start=1e-4,
        beta_end=2e-2,
        beta_schedule='linear',
        variance_type='learned_range',
        clip_sample=False,
        timestep_spacing='linspace',
    ),
    loss=dict(type='mmvttt.DDPMLoss'),
)
