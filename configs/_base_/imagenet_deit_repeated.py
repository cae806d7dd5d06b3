# imagenet_deit.py with DeiT's repeated augmentation, as T⁵'s authors train: an epoch has a third of
# the images, each of them three times in versions of its own.
_base_ = './imagenet_deit.py'

train_dataloader = dict(sampler=dict(type='RepeatAugSampler'))
