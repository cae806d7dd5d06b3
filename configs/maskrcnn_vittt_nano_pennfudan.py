# The route of all recipes in small: Vittt pretrained on CIFAR-10 (the weights come with the
# package), its patches of 4 pixels enlarged to 16, in a ViT-Adapter with Mask R-CNN on Penn-Fudan.
# docs/results.md compares it with random weights (model.backbone.backbone.init_cfg=None).
_base_ = './maskrcnn_vittt_demo.py'

data_root = '{{$MMVTTT_DATA:data}}/pennfudan/'
classes = ('person',)
image_size = (240, 192)
max_epochs = 12

train_pipeline = _base_.train_pipeline
train_pipeline[2].scale = image_size
train_pipeline.insert(3, dict(type='RandomFlip', prob=0.5))
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = image_size
tta_pipeline = _base_.tta_pipeline
tta_pipeline[1].transforms[:2] = [
    [dict(type='Resize', scale=image_size, keep_ratio=True)],
    [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)],
]

data = dict(data_root=data_root, metainfo=dict(classes=classes))
train_dataloader = dict(batch_size=4, dataset=dict(data, pipeline=train_pipeline))
# The photographs differ in size: in a batch they would be padded, which changes what is found.
val_dataloader = dict(batch_size=1, dataset=dict(data, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator

model = dict(
    backbone=dict(
        interaction_indexes=[[0, 2], [3, 5]],
        backbone=dict(arch=dict(num_layers=6), img_size=image_size[::-1]),
    ),
    roi_head=dict(bbox_head=dict(num_classes=1), mask_head=dict(num_classes=1)),
)

train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs
default_hooks = dict(checkpoint=dict(interval=4), logger=dict(interval=5))
log_processor = dict(window_size=5)
