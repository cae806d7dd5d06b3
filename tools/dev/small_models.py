"""Writes configs of small models that differ only in their six backbones, for docs/results.md.

Equal heads, images, schedules and learning rates on three sets: the built-in digits, Penn-Fudan and
CamVid. The plain backbones have four blocks, of 96 channels in one ViT-Adapter, of 64 in the
classifier of digits; "vit" is the body of T⁵ with softmax attention.

example: python tools/dev/small_models.py work_dirs/small
         python tools/sweep.py work_dirs/small/camvid_*.py --seeds 3 --out work_dirs/small/camvid
"""

import argparse
from pathlib import Path
from pprint import pformat

ARCH = dict(embed_dims=96, num_layers=4, num_heads=3, feedforward_channels=256)
SOFTMAX = dict(inner=dict(type='SoftmaxAttention'), key_norm=None, locality=None)
PLAIN = dict(
    vittt=dict(type='mmvttt.Vittt'),
    vit3=dict(type='mmvttt.ViT3'),
    t5=dict(type='mmvttt.T5'),
    vit=dict(type='mmvttt.T5', mixer=SOFTMAX),
)
STAGES = dict(
    hvit3=(
        dict(
            type='mmvttt.HViT3',
            arch=dict(embed_dims=[32, 64, 128, 192], depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 6]),
        ),
        [32, 64, 128, 192],
    ),
    resnet18=(
        dict(
            type='mmdet.ResNet', depth=18, norm_cfg=dict(type='BN'), norm_eval=False,
            frozen_stages=-1, style='pytorch',
        ),
        [64, 128, 256, 512],
    ),
)  # fmt: skip

DIGITS = """_base_ = 'mmvttt::vittt_digits.py'
max_epochs = 8
"""
PENNFUDAN = """_base_ = 'mmvttt::maskrcnn_vittt_demo.py'
train_pipeline, test_pipeline = _base_.train_pipeline, _base_.test_pipeline
train_pipeline[2].scale = test_pipeline[1].scale = (160, 128)
train_pipeline.insert(3, dict(type='RandomFlip', prob=0.5))
root = '{{$MMVTTT_DATA:data}}/pennfudan/'
data = dict(data_root=root, metainfo=dict(classes=('person',)))
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=train_pipeline, **data))
val_dataloader = test_dataloader = dict(dataset=dict(pipeline=test_pipeline, **data))
val_evaluator = test_evaluator = dict(ann_file=root + 'annotations/instances_val.json')
# Heads without norms, as docs/results.md was measured.
mask_head = dict(num_classes=1, conv_out_channels=64, norm_cfg=None)
model = dict(
    neck=dict(norm_cfg=None),
    roi_head=dict(bbox_head=dict(num_classes=1), mask_head=mask_head),
)
max_epochs = 12
"""
CAMVID = """_base_ = 'mmvttt::upernet_vittt_t_camvid.py'
train_pipeline, test_pipeline = _base_.train_pipeline, _base_.test_pipeline
train_pipeline[2].scale = test_pipeline[1].scale = (192, 144)
train_pipeline[3].crop_size = (128, 128)
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
norm_cfg = dict(_delete_=True, type='BN')
model = dict(
    data_preprocessor=dict(size=(128, 128)),
    decode_head=dict(channels=64, norm_cfg=norm_cfg),
    auxiliary_head=dict(channels=32, norm_cfg=norm_cfg),
)
optim_wrapper = dict(optimizer=dict(lr=1e-3))
max_epochs = 12
"""
LENGTH = """
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = _base_.param_scheduler
param_scheduler[1].T_max = max_epochs
default_hooks = dict(checkpoint=dict(_delete_=True, type='CheckpointHook', interval=max_epochs))
"""


def backbones(task: str, img_size: tuple[int, int]) -> dict[str, tuple[dict, list[int]]]:
    """Configs of the backbones and the channels of their maps."""
    if task == 'cls':
        # Everything else about the plain backbones is as in vittt_digits.
        stages, channels = STAGES['hvit3']
        stages = dict(stages, _delete_=True, in_channels=1, out_type='avg_featmap')
        resnet = dict(_delete_=True, type='ResNet_CIFAR', depth=18, in_channels=1)
        plain = {name: (backbone, [64]) for name, backbone in PLAIN.items()}
        return plain | dict(hvit3=(stages, channels), resnet18=(resnet, [512]))
    indexes = [[0, 1], [2, 3]] if task == 'det' else [[i, i] for i in range(4)]
    adapter = dict(
        _delete_=True,
        type='mmvttt.ViTAdapter',
        task=task,
        interaction_indexes=indexes,
        num_extra_extractors=0,
        deform_ratio=0.5,
        conv_inplane=32,
        norm_cfg=dict(type='BN'),
    )
    plain = {
        name: (dict(adapter, backbone=dict(arch=ARCH, img_size=img_size, **backbone)), [96] * 4)
        for name, backbone in PLAIN.items()
    }
    stages = {name: (dict(x, _delete_=True), channels) for name, (x, channels) in STAGES.items()}
    return plain | stages


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path, help='folder of the configs')
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    sets = dict(
        digits=(DIGITS, 'cls', (20, 20)),
        pennfudan=(PENNFUDAN, 'det', (128, 160)),
        camvid=(CAMVID, 'seg', (128, 128)),
    )
    for name, (text, task, size) in sets.items():
        for kind, (backbone, channels) in backbones(task, size).items():
            changed = dict(backbone=backbone)
            if task == 'cls':
                changed['head'] = dict(in_channels=channels[-1])
                if kind == 'resnet18':
                    changed['neck'] = dict(type='GlobalAveragePooling')
            elif task == 'det':
                changed['neck'] = dict(in_channels=channels)
            else:
                changed['decode_head'] = dict(in_channels=channels)
                changed['auxiliary_head'] = dict(in_channels=channels[2])
            head = '' if 'model = ' in text else '\nmodel = dict()\n'
            update = '\n'.join(f'model.setdefault({key!r}, dict()).update({pformat(value)})'
                               for key, value in changed.items())  # fmt: skip
            (out / f'{name}_{kind}.py').write_text(f'{text}{LENGTH}{head}{update}\n')


if __name__ == '__main__':
    main()
