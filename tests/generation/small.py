"""Configs of diffusion models that train in milliseconds."""

import copy

SMALL = dict(embed_dims=24, num_layers=2, num_heads=2)
DDPM = dict(
    type='diffusers.DDPMScheduler',
    variance_type='learned_range',
    clip_sample=False,
    timestep_spacing='linspace',
)
FLOW = dict(type='diffusers.FlowMatchEulerDiscreteScheduler', shift=3.0)


def model(**changes) -> dict:
    """A DiT³ of 1×8×8 'latents' and ten classes, trained as DiT; changes of its options."""
    config = dict(
        type='mmvttt.DiffusionModel',
        transformer=dict(
            type='mmvttt.DiT3',
            arch=SMALL,
            patch_size=4,
            sample_size=8,
            in_channels=1,
            num_classes=10,
        ),
        scheduler=DDPM,
        loss=dict(type='mmvttt.DDPMLoss'),
    )
    config['transformer'].update(changes.pop('transformer', {}))
    return copy.deepcopy({**config, **changes})


def flow_model(**changes) -> dict:
    """The same, trained by rectified flow."""
    transformer = {'out_channels': 1, **changes.pop('transformer', {})}
    loss = changes.pop('loss', dict(type='mmvttt.FlowLoss'))
    return model(transformer=transformer, scheduler=FLOW, loss=loss, **changes)
