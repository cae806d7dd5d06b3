# A linear head on the pooled features of a plain backbone; DeiT's label smoothing, mixup, cutmix.
model = dict(
    type='ImageClassifier',
    backbone=dict(out_type='avg_featmap'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
    train_cfg=dict(
        augments=[
            dict(type='Mixup', alpha=0.8),
            dict(type='CutMix', alpha=1.0),
        ],
    ),
)
