# SD3.5-FT, the softmax twin of sd35m_t5_3k.py: Stable Diffusion 3.5 Medium, fine-tuned for 3000
# steps of 64 images of 1024×1024 (t5 Sec. 5.3, Tab. 7).
# The paper's result: DPG-Bench 82.74, GenEval 0.70.
# Its weights are gated: get them, and save its transformer's for load_from as
# torch.save({f'transformer.{n}': v for n, v in transformer.state_dict().items()}, 'source.pth')
# Latents and embedded prompts are looked for under $MMVTTT_DATA/latents_1024 (docs/generation.md).
_base_ = ['./_base_/diffusion_runtime.py', './_base_/fsdp.py']

model = dict(
    type='mmvttt.DiffusionModel',
    transformer=dict(
        type='diffusers.SD3Transformer2DModel',
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=24,
        attention_head_dim=64,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pooled_projection_dim=2048,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm='rms_norm',
    ),
    # The shift is its published scheduler's, as far as we know.
    scheduler=dict(type='diffusers.FlowMatchEulerDiscreteScheduler', shift=3.0),
    loss=dict(type='mmvttt.FlowLoss', prediction='velocity'),
    with_cp=True,
)

train_dataloader = dict(
    # On each of 8 GPUs.
    batch_size=8,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    drop_last=True,
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='mmvttt.CachedLatents',
        data_root='{{$MMVTTT_DATA:data}}/latents_1024',
        # Prompts say what is on the left.
        flip=False,
        conditions=['encoder_hidden_states', 'pooled_projections'],
    ),
)
# The paper does not state its precision.
optim_wrapper = dict(
    type='mmvttt.AmpOptimWrapper', optimizer=dict(type='AdamW', lr=1e-5, weight_decay=1e-4)
)
auto_scale_lr = dict(base_batch_size=64)
train_cfg = dict(max_iters=3000)
default_hooks = dict(checkpoint=dict(interval=1000))
