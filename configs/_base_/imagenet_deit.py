# ImageNet-1k at 224×224 with DeiT's RandAugment and erasing; 128 images on each of 8 GPUs.
# The images are looked for under $MMVTTT_DATA/imagenet (default: data/imagenet): train/, val/.
_base_ = 'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py'

data_root = '{{$MMVTTT_DATA:data}}/imagenet'

train_dataloader = dict(batch_size=128, dataset=dict(data_root=data_root))
val_dataloader = dict(batch_size=128, dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
