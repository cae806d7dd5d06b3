# DINO with four scales (mmdet's), H-ViT³-T, COCO, 12 epochs.
# No paper has trained it, and nor have we: there is no result.
_base_ = ['mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', './_base_/tta_det.py']

data_root = '{{$MMVTTT_DATA:data}}/coco/'
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

# Images of many sizes: one graph of each kind of block, when training on a GPU.
compile_blocks = dict(dynamic=True)

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmvttt.HViT3',
        arch='tiny',
        drop_path_rate=0.1,
        out_indices=(1, 2, 3),
        norm_cfg=dict(type='SyncBN'),
        init_cfg=dict(type='Pretrained', checkpoint='mmvttt://hvit3_t_mesa_in1k'),
    ),
    neck=dict(in_channels=[128, 320, 512]),
)

# A training without pretrained weights gets a warning; pretrained=False removes them.
pretrained = True
