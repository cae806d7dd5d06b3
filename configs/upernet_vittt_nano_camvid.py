# The route of all recipes in small, for segmentation: Vittt with the package's weights of CIFAR-10,
# its patches of 4 pixels resized to 16, in a ViT-Adapter with UPerNet on CamVid.
# docs/results.md compares it with random weights (model.backbone.backbone.init_cfg=None).
_base_ = './upernet_vittt_t_camvid.py'

scale = (240, 180)
crop_size = (160, 160)
channels = 64
max_epochs = 20

train_pipeline = _base_.train_pipeline
train_pipeline[2].scale = scale
train_pipeline[3].crop_size = crop_size
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = scale
train_dataloader = dict(num_workers=1, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(num_workers=1, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

model = dict(
    data_preprocessor=dict(size=crop_size),
    backbone=dict(
        interaction_indexes=[[0, 1], [2, 2], [3, 3], [4, 5]],
        num_extra_extractors=0,
        deform_ratio=0.5,
        conv_inplane=32,
        backbone=dict(
            arch=dict(
                _delete_=True,
                embed_dims=96,
                num_layers=6,
                num_heads=3,
                feedforward_channels=256,
            ),
            img_size=crop_size,
            drop_path_rate=0.0,
            init_cfg=dict(
                type='Pretrained', checkpoint='mmvttt://cifar10_vittt_nano', prefix='backbone.'
            ),
        ),
    ),
    decode_head=dict(in_channels=[96] * 4, channels=channels),
    auxiliary_head=dict(in_channels=96, channels=channels),
)

train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs
default_hooks = dict(checkpoint=dict(interval=5, save_best=None))
randomness = dict(seed=0)
