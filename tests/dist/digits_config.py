# The demo's Mask R-CNN, with the norms of the 1x configs, for 2 steps of 4 digits' images: 2 ranks.
_base_ = ['../../configs/maskrcnn_vittt_demo.py', '../../configs/_base_/ddp.py']

custom_imports = dict(imports=['small'])
data_root = '{{$DIGITS:digits}}/'
loader = dict(batch_size=2, num_workers=0, persistent_workers=False)
train_dataloader = dict(**loader, dataset=dict(data_root=data_root))
val_dataloader = dict(**loader, dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator
model = dict(backbone=dict(norm_cfg=dict(type='SyncBN')))
train_cfg = dict(max_epochs=1)
custom_hooks = [dict(type='Keep')]
