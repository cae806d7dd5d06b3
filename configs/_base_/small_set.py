# For tens to thousands of pictures, beside the config of any model: AdamW whose warm-up is a
# twentieth of the steps, however many they are, and augmentations, which `mmvttt finetune` uses.


def loaders(kind, train, val, batch_size=1, **options):
    shuffled, in_order = (dict(type='DefaultSampler', shuffle=shuffle) for shuffle in (True, False))
    return dict(
        train_dataloader=dict(
            _delete_=True, sampler=shuffled, dataset=dict(type=kind, pipeline=train), **options
        ),
        val_dataloader=dict(
            _delete_=True,
            batch_size=batch_size,
            sampler=in_order,
            dataset=dict(type=kind, pipeline=val),
            **options,
        ),
    )


# Pictures, and crops, without an object are learned too: what is not one.
def objects(masks, metric):
    annotations = dict(type='LoadAnnotations', with_bbox=True, with_mask=masks)
    return dict(
        loaders(
            'CocoDataset',
            [
                dict(type='LoadImageFromFile'),
                annotations,
                dict(
                    type='RandomResize', scale=(480, 384), ratio_range=(0.7, 1.3), keep_ratio=True
                ),
                dict(type='RandomCrop', crop_size=(384, 480), allow_negative_crop=True),
                dict(type='FilterAnnotations', min_gt_bbox_wh=(4, 4), keep_empty=False),
                dict(type='RandomFlip', prob=0.5),
                dict(type='PackDetInputs'),
            ],
            [
                dict(type='LoadImageFromFile'),
                dict(type='Resize', scale=(480, 384), keep_ratio=True),
                annotations,
                dict(type='PackDetInputs'),
            ],
        ),
        evaluator=dict(_delete_=True, type='CocoMetric', metric=metric, classwise=True),
    )


small_set = dict(
    optim_wrapper=dict(
        _delete_=True,
        type='OptimWrapper',
        optimizer=dict(type='AdamW', lr=4e-4, weight_decay=0.05),
        clip_grad=dict(max_norm=5.0),
    ),
    param_scheduler=[
        dict(
            type='mmvttt.WarmupCosineLR',
            warmup_ratio=1 / 20,
            eta_min_ratio=0.0,
            convert_to_iter_based=True,
        )
    ],
    train_cfg=dict(_delete_=True, type='EpochBasedTrainLoop'),
    default_hooks=dict(checkpoint=dict(_delete_=True, type='CheckpointHook', max_keep_ckpts=1)),
    log_processor=dict(by_epoch=True),
    randomness=dict(seed=0),
    boxes=objects(False, 'bbox'),
    masks=objects(True, ['bbox', 'segm']),
    maps=dict(
        loaders(
            'BaseSegDataset',
            [
                dict(type='LoadImageFromFile'),
                dict(type='LoadAnnotations'),
                dict(
                    type='RandomResize', scale=(240, 180), ratio_range=(0.5, 2.0), keep_ratio=True
                ),
                dict(type='RandomCrop', crop_size=(160, 160), cat_max_ratio=0.75),
                dict(type='RandomFlip', prob=0.5),
                dict(type='PhotoMetricDistortion'),
                dict(type='PackSegInputs'),
            ],
            [
                dict(type='LoadImageFromFile'),
                dict(type='Resize', scale=(240, 180), keep_ratio=True),
                dict(type='LoadAnnotations'),
                dict(type='PackSegInputs'),
            ],
        ),
        evaluator=dict(_delete_=True, type='IoUMetric', iou_metrics=['mIoU']),
    ),
    classes=dict(
        loaders(
            'CustomDataset',
            [
                dict(type='LoadImageFromFile'),
                dict(type='RandomResizedCrop', scale=224, crop_ratio_range=(0.35, 1.0)),
                dict(type='RandomFlip', prob=0.5, direction='horizontal'),
                dict(
                    type='ColorJitter', brightness=0.4, contrast=0.4, saturation=0.4, backend='cv2'
                ),
                dict(type='PackInputs'),
            ],
            [
                dict(type='LoadImageFromFile'),
                dict(type='ResizeEdge', scale=224, edge='short'),
                dict(type='CenterCrop', crop_size=224),
                dict(type='PackInputs'),
            ],
            batch_size=16,
            collate_fn=dict(type='default_collate'),
        ),
        evaluator=[
            dict(type='Accuracy', topk=1),
            dict(type='SingleLabelMetric', items=['recall'], average=None),
        ],
    ),
)
