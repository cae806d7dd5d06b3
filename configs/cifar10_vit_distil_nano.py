# The ViT of cifar10_vit_nano.py, whose weights come with the package, distilled into its linear
# twin: 312 steps of 64, a twentieth of its own, on a tenth of CIFAR-10's pictures without labels.
#   python tools/train.py configs/cifar10_vit_distil_nano.py
_base_ = './_base_/distil.py'

max_iters = 312

model = dict(
    backbone=dict(
        model='vit_tiny_patch16_224',
        model_options=dict(embed_dim=96, depth=6, num_heads=3, class_token=False),
        img_size=32,
        patch_size=4,
        init_cfg=dict(type='Pretrained', checkpoint='mmvttt://cifar10_vit_nano'),
    ),
    data_preprocessor=dict(mean=[125.3, 123.0, 113.9], std=[63.0, 62.1, 66.7]),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    num_workers=1,
    dataset=dict(
        data_root='{{$MMVTTT_DATA:data}}/cifar10/train',
        pipeline=train_pipeline,
        # The files lie by class: every tenth.
        indices=list(range(0, 50000, 10)),
    ),
)

train_cfg = dict(max_iters=max_iters)
param_scheduler = [
    dict(type='mmvttt.WarmupCosineLR', warmup_ratio=0.05, by_epoch=False, end=max_iters)
]
custom_hooks = [dict(type='mmvttt.BlockwiseHook', iters=62)]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=max_iters))
randomness = dict(seed=0)
