# ImageNet-1k at 256×256 as latents of Stable Diffusion's autoencoder, 32 on each of 8 GPUs.
# Looked for under $MMVTTT_DATA/latents_256 (default: data/latents_256). To make them once:
#   python tools/cache_latents.py data/imagenet/train sd-vae-ft-ema data/latents_256
train_dataloader = dict(
    batch_size=32,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    drop_last=True,
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='mmvttt.CachedLatents', data_root='{{$MMVTTT_DATA:data}}/latents_256'),
)
