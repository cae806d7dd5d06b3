# CIFAR-10 in folders by class: 50,000 and 10,000 images of 32×32, crop and flip for training.
# Looked for under $MMVTTT_DATA/cifar10 (default: data/cifar10), {train,test}/{class}/*.png or jpg;
# tools/dev/small_sets.py of a clone writes them from torchvision's CIFAR10.
data_root = '{{$MMVTTT_DATA:data}}/cifar10'
classes = [
    'airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck',
]  # fmt: skip
data = dict(type='CustomDataset', data_root=data_root, metainfo=dict(classes=classes))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
# Larger photographs are brought to this size; the images of the set stay as they are.
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=32, interpolation='area'),
    dict(type='CenterCrop', crop_size=32),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=64,
    num_workers=1,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(data, data_prefix='train', pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=100,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='default_collate'),
    dataset=dict(data, data_prefix='test', pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=1)
test_evaluator = val_evaluator

# For test.py --tta: the scores of each image and of its mirror image are averaged.
flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
tta_model = dict(type='AverageClsScoreTTA')
tta_pipeline = [
    *test_pipeline[:-1],
    dict(type='TestTimeAug', transforms=[flips, test_pipeline[-1:]]),
]
