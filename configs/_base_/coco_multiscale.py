# COCO instance segmentation, short side 480 to 800 and long side up to 1333.
# The images and annotations are looked for under $MMVTTT_DATA/coco (default: data/coco).
_base_ = ['mmdet::_base_/datasets/coco_instance.py', './tta_det.py']

data_root = '{{$MMVTTT_DATA:data}}/coco/'
train_pipeline = _base_.train_pipeline
train_pipeline[2] = dict(
    type='RandomChoiceResize',
    scales=[(1333, short) for short in range(480, 801, 32)],
    keep_ratio=True,
)

train_dataloader = dict(dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

# One graph for each kind of block and all sizes of image, when training on a GPU.
compile_blocks = dict(dynamic=True)
