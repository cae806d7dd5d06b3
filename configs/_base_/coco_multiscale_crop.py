# COCO instance segmentation, multi-scale as in coco_multiscale.py, for half of the images after a
# crop of 384 to 600 pixels a side (the augmentation of DETR, Swin and H-ViT³).
_base_ = './coco_multiscale.py'

scales = [(1333, short) for short in range(480, 801, 32)]
resize = dict(type='RandomChoiceResize', scales=scales, keep_ratio=True)
enlarge = dict(
    type='RandomChoiceResize', scales=[(1333, short) for short in (400, 500, 600)], keep_ratio=True
)
crop = dict(
    type='RandomCrop',
    crop_type='absolute_range',
    crop_size=(384, 600),
    allow_negative_crop=True,
)
train_pipeline = _base_.train_pipeline
train_pipeline[2] = dict(type='RandomChoice', transforms=[[resize], [enlarge, crop, resize]])

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
