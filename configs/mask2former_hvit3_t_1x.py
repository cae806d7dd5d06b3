# Mask2Former (mmdet's, instances), H-ViT³-T, COCO with large-scale jittering, 12 epochs.
# No paper has trained it, and nor have we: there is no result.
_base_ = ['mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py', './_base_/tta_det.py']

data_root = '{{$MMVTTT_DATA:data}}/coco/'
# Without the panoptic PNGs that the base inherits, and that instances do not need.
train_dataloader = dict(
    dataset=dict(data_root=data_root, data_prefix=dict(_delete_=True, img='train2017/'))
)
val_dataloader = dict(
    dataset=dict(data_root=data_root, data_prefix=dict(_delete_=True, img='val2017/'))
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

# Crops of one size: one graph of the backbone, when training on a GPU.
compile_blocks = dict(dynamic=False, whole=True)

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmvttt.HViT3',
        arch='tiny',
        drop_path_rate=0.1,
        norm_cfg=dict(type='SyncBN'),
        init_cfg=dict(type='Pretrained', checkpoint='mmvttt://hvit3_t_mesa_in1k'),
    ),
    panoptic_head=dict(in_channels=[64, 128, 320, 512]),
)

# 16 images a step: 7330 steps an epoch. Mmdet's schedule has 50 epochs.
max_iters = 12 * 7330
param_scheduler = dict(end=max_iters, milestones=[8 * 7330, 11 * 7330])
train_cfg = dict(max_iters=max_iters, val_interval=7330, dynamic_intervals=None)
default_hooks = dict(checkpoint=dict(interval=7330))

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
