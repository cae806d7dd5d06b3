# A small Vittt on scikit-learn's 1797 handwritten digits, 20×20: a classifier in a minute on a CPU.
#   python tools/train.py configs/vittt_digits.py
_base_ = ['./_base_/adamw_cosine.py', 'mmpretrain::_base_/default_runtime.py']

max_epochs = 8
resize = dict(type='Resize', scale=20, interpolation='bicubic')
train_pipeline = [resize, dict(type='RandomCrop', crop_size=20, padding=3), dict(type='PackInputs')]
test_pipeline = [resize, dict(type='PackInputs')]

model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(mean=[128.0], std=[64.0], num_classes=10),
    backbone=dict(
        type='mmvttt.Vittt',
        arch=dict(embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=128),
        img_size=20,
        patch_size=2,
        in_channels=1,
        out_type='avg_featmap',
    ),
    head=dict(type='LinearClsHead', in_channels=64, num_classes=10),
)

train_dataloader = dict(
    batch_size=32,
    num_workers=1,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='mmvttt.DigitImages', pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=90,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='mmvttt.DigitImages', split='test', pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=1)
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(lr=2e-3))
train_cfg = dict(max_epochs=max_epochs)
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = 40
param_scheduler[1].T_max = max_epochs

default_hooks = dict(logger=dict(interval=20), checkpoint=dict(max_keep_ckpts=1))
log_processor = dict(window_size=20)
randomness = dict(seed=0)
