# Mask R-CNN with a small Vittt in a ViT-Adapter on handwritten digits, minutes on two CPU cores.
# The images: `python -m mmvttt.openmmlab.datasets.digits`; all of it: `make demo`. The backbone
# begins with the first four blocks of the weights that come with the package.
_base_ = [
    './_base_/maskrcnn_vit_adapter.py',
    './_base_/adamw_cosine.py',
    'mmdet::_base_/datasets/coco_instance.py',
    './_base_/tta_det.py',
    'mmdet::_base_/default_runtime.py',
]

data_root = 'data/mmvttt_digits/'
metainfo = dict(classes=tuple('0123456789'))
image_size = (160, 160)
channels = 64
norm_cfg = dict(type='BN')
# One sample a bin: digits are a dozen cells wide on the finest map.
roi_layer = dict(sampling_ratio=1)
batch_size = 2
max_epochs = 4

train_pipeline = _base_.train_pipeline
train_pipeline[2].scale = image_size
# No flip: the mirror image of a 2 is no digit.
del train_pipeline[3]
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = image_size
# For test.py --tta: two sizes instead of a mirror image.
tta_pipeline = _base_.tta_pipeline
tta_pipeline[1].transforms[:2] = [
    [dict(type='Resize', scale=(side, side), keep_ratio=True) for side in (160, 208)],
    [dict(type='RandomFlip', prob=0.0)],
]

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=4,
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator

model = dict(
    backbone=dict(
        interaction_indexes=[[0, 1], [2, 3]],
        num_extra_extractors=0,
        deform_ratio=0.5,
        conv_inplane=32,
        norm_cfg=norm_cfg,
        backbone=dict(
            type='mmvttt.Vittt',
            arch=dict(embed_dims=96, num_layers=4, num_heads=3, feedforward_channels=256),
            img_size=image_size,
            init_cfg=dict(
                type='Pretrained',
                checkpoint='mmvttt://cifar10_vittt_nano',
                prefix='backbone.',
                first_blocks=True,
            ),
        ),
    ),
    # Thin heads: on a CPU they would cost more than the backbone. Norms, as they start from random
    # weights; and one box and one mask for all digits, which learn from every digit.
    neck=dict(in_channels=[96] * 4, out_channels=channels, num_outs=4, norm_cfg=norm_cfg),
    rpn_head=dict(
        in_channels=channels,
        feat_channels=channels,
        anchor_generator=dict(strides=[4, 8, 16, 32]),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=channels, roi_layer=roi_layer),
        bbox_head=dict(
            in_channels=channels, fc_out_channels=256, num_classes=10, reg_class_agnostic=True
        ),
        mask_roi_extractor=dict(out_channels=channels, roi_layer=roi_layer),
        mask_head=dict(
            num_convs=1,
            in_channels=channels,
            conv_out_channels=32,
            num_classes=10,
            class_agnostic=True,
            norm_cfg=norm_cfg,
        ),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=100),
        rcnn=dict(sampler=dict(num=32, pos_fraction=0.5)),
    ),
    test_cfg=dict(
        rpn=dict(nms_pre=200, max_per_img=50),
        rcnn=dict(max_per_img=20),
    ),
)

optim_wrapper = dict(optimizer=dict(fused=True))
train_cfg = dict(max_epochs=max_epochs, val_interval=1)
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs

default_hooks = dict(
    logger=dict(interval=25),
    checkpoint=dict(interval=1, max_keep_ckpts=1),
    # The first pictures after a quarter of the training, in vis_data/vis_image.
    visualization=dict(draw=True, interval=5),
)
log_processor = dict(window_size=25)
randomness = dict(seed=0)
