# Mask R-CNN, H-ViT³-T, from its authors' weights for COCO (3x, box AP 48.9), on data of your own,
# by the example of the Penn-Fudan pedestrians. Change what maskrcnn_vittt_t_pennfudan.py lists. A
# class that COCO has under the same name keeps its part of the heads, the others are new; the log
# says which. Nobody has measured this schedule: tune its rate and its length.
_base_ = './maskrcnn_vittt_t_pennfudan.py'

load_from = 'mmvttt://maskrcnn_hvit3_t_3x'
short_side, long_side = 640, 1066
max_epochs = 12

train_pipeline = _base_.train_pipeline
train_pipeline[2].scale = (long_side, short_side)
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = (long_side, short_side)
tta_pipeline = _base_.tta_pipeline
tta_pipeline[1].transforms[0] = [test_pipeline[1]]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

model = dict(
    # The stem keeps its BatchNorms' statistics: batches are small.
    backbone=dict(
        _delete_=True, type='mmvttt.HViT3', arch='tiny', drop_path_rate=0.1, frozen_stages=0
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)

train_cfg = dict(max_epochs=max_epochs)
# The heads, which have new classes, learn ten times as fast.
optim_wrapper = dict(
    optimizer=dict(lr=5e-5), paramwise_cfg=dict(custom_keys=dict(head=dict(lr_mult=10.0)))
)
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
