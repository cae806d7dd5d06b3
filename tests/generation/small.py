"""Diffusion models that train in milliseconds."""

import copy

import torch

SMALL = dict(embed_dims=24, num_layers=2, num_heads=2)
DDPM = dict(
    type='diffusers.DDPMScheduler',
    variance_type='learned_range',
    clip_sample=False,
    timestep_spacing='linspace',
)
FLOW = dict(type='diffusers.FlowMatchEulerDiscreteScheduler', shift=3.0)

SD3 = dict(
    type='diffusers.SD3Transformer2DModel',
    sample_size=8,
    patch_size=2,
    in_channels=3,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=12,
    caption_projection_dim=16,
    pooled_projection_dim=9,
    out_channels=3,
    pos_embed_max_size=8,
)
DIFFUSERS_DIT = dict(
    type='diffusers.DiTTransformer2DModel',
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=1,
    out_channels=2,
    num_layers=2,
    sample_size=8,
    num_embeds_ada_norm=10,
)


def small_vae(**options):
    """An autoencoder of images of 32×32, whose latents are half as large."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = dict(block_out_channels=(8, 8), down_block_types=('DownEncoderBlock2D',) * 2)
    up = dict(up_block_types=('UpDecoderBlock2D',) * 2, norm_num_groups=4)
    return AutoencoderKL(**{**blocks, **up, 'sample_size': 32, **options}).eval()


def model(**changes) -> dict:
    """A DiT³ of 1×8×8 'latents' and ten classes, trained as DiT; changes of its options."""
    options = dict(patch_size=4, sample_size=8, in_channels=1, num_classes=10)
    transformer = dict(type='mmvttt.DiT3', arch=SMALL, **options)
    config = dict(
        type='mmvttt.DiffusionModel',
        transformer={**transformer, **changes.pop('transformer', {})},
        scheduler=DDPM,
        loss=dict(type='mmvttt.DDPMLoss'),
    )
    return copy.deepcopy({**config, **changes})


def flow_model(**changes) -> dict:
    """The same, trained by rectified flow."""
    transformer = {'out_channels': 1, **changes.pop('transformer', {})}
    loss = changes.pop('loss', dict(type='mmvttt.FlowLoss'))
    return model(transformer=transformer, scheduler=FLOW, loss=loss, **changes)
