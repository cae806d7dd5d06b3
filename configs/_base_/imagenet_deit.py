# ImageNet-1k at 224×224 with DeiT's RandAugment and erasing; 128 images on each of 8 GPUs.
# The images are looked for under $MMVTTT_DATA/imagenet (default: data/imagenet): train/, val/.
_base_ = 'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py'

data_root = '{{$MMVTTT_DATA:data}}/imagenet'

train_dataloader = dict(batch_size=128, dataset=dict(data_root=data_root))
val_dataloader = dict(batch_size=128, dataset=dict(data_root=data_root))
test_dataloader = val_dataloader

# Images of one size: one graph of the backbone, when training on a GPU.
compile_blocks = dict(dynamic=False, whole=True)

# For test.py --tta: the scores of each image and of its mirror image are averaged.
flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
tta_model = dict(type='AverageClsScoreTTA')
tta_pipeline = [
    *_base_.test_pipeline[:-1],
    dict(type='TestTimeAug', transforms=[flips, _base_.test_pipeline[-1:]]),
]
