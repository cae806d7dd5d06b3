"""A reduced config of each backbone, to be changed for the worse."""

PLAIN = dict(embed_dims=32, num_layers=3, num_heads=2, feedforward_channels=32)
STAGES = dict(embed_dims=(16, 16, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2))
BASES = {
    'Vittt': dict(type='mmvttt.Vittt', arch=PLAIN, mixer={}),
    'ViT3': dict(type='mmvttt.ViT3', arch=PLAIN, mixer=dict(type='mmvttt.ViT3Mixer')),
    'ViT3 of the design space': dict(
        type='mmvttt.ViT3', arch=PLAIN, mixer=dict(type='mmvttt.TTTMixer', inner=dict(type='MLP'))
    ),
    'T5': dict(type='mmvttt.T5', arch=PLAIN, img_size=64, mixer={}),
    'HViT3': dict(type='mmvttt.HViT3', arch=STAGES),
    'ViTAdapter': dict(
        type='mmvttt.ViTAdapter',
        conv_inplane=8,
        norm_cfg=dict(type='BN'),
        backbone=dict(type='mmvttt.Vittt', arch=PLAIN),
    ),
}
