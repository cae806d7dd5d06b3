"""The config of a fine-tuning: two lines that read finetune.json, which lies beside it as data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config

from mmvttt.checkpoints.atomic_write import write_whole

from ..config import config_root
from ..tasks import Task, class_counts, set_picture_size, task_of

CONFIG, SETTINGS = 'config.py', 'finetune.json'
BEST, LAST = 'best.pth', 'last.pth'
# Fewer steps have a constant rate.
_SCHEDULED = 10
# No text from outside: mmengine substitutes {{…}} in a config's text, and runs it. It takes a
# config with the statement `import` for one of another kind.
_TEXT = f"""\
# Written by `mmvttt finetune`. {SETTINGS} beside it has what was read and planned: the folder, its
# classes, the start, size, steps, rate. To change them, edit it, or write your own config with this
# one as its _base_.
_base_ = './{SETTINGS}'
module = __import__('mmvttt.openmmlab.apis.finetune_config', fromlist=['entries'])
locals().update(module.entries(_base_))
"""


def write_config(folder: Path, base: str, own: Mapping[str, Any]) -> None:
    """Writes config.py and finetune.json, whole or not at all.

    Args:
        folder: Where to write them.
        base: The config to start from, as `_base_` takes it.
        own: What `entries` reads.
    """
    # mmengine substitutes {{…}} in a JSON's text, too. Outside of strings JSON has no two braces
    # without a space or a name between them.
    text = json.dumps(dict(_base_=base, own=own), indent=1).replace('{{', '{\\u007b')
    write_whole(folder / SETTINGS, text.encode())
    write_whole(folder / CONFIG, _TEXT.encode())


def complete_config(folder: Path) -> Path:
    """The config in a folder, written again where a full disk has left a part of it."""
    config = folder / CONFIG
    if not config.is_file() or _TEXT.startswith(config.read_text(encoding='utf-8')):
        write_whole(config, _TEXT.encode())
    return config


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads the settings that `write_config` wrote; empty if they are missing or damaged."""
    try:
        content = json.loads((folder / SETTINGS).read_text(encoding='utf-8'))
        return content if isinstance(content['own'], dict) and content['_base_'] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def entries(base: Any) -> dict[str, Any]:
    """The entries of a config that trains what finetune.json describes.

    Args:
        base: The merged `_base_`: entries of the start's config, and `own`:

            - `task`, `classes`, `root`; `train` and `val`: arguments of the data sets;
            - `weights`: the checkpoint of a whole model, or None; `backbone`: its options;
            - `size` and `crop`: (height, width) of the pictures, and of what is cut out of them;
              `batch`, `workers`, `most` (objects in a picture);
            - `steps`, `every` (steps between validations), `rate` (None: the start's), `patience`
              (validations without a better result that end the training).
    """
    own = base.own
    small = Config.fromfile(
        config_root() / '_base_/small_set.py',
        use_predefined_variables=False,
        use_environment_variables=False,
    ).small_set
    kind, task = small[own.task], task_of(base)
    measure = task.measures[own.task][0]
    for part in ('train', 'val'):
        loader = kind[f'{part}_dataloader']
        loader.num_workers = own.workers
        data = loader.dataset
        data.update(data_root=own.root, metainfo=dict(classes=tuple(own.classes)), **own[part])
        set_picture_size(data.pipeline, tuple(own.size), tuple(own.crop))
    train, val, evaluator = kind.train_dataloader, kind.val_dataloader, kind.evaluator
    train.batch_size = own.batch
    train.sampler = dict(type='InfiniteSampler', shuffle=True)
    _fit_model(base, own, task)
    if own.task in ('boxes', 'masks'):
        evaluator.ann_file = val.dataset.ann_file
    wrapper = base.optim_wrapper if own.rate is None else small.optim_wrapper
    if own.rate is not None:
        wrapper.optimizer.lr = own.rate
    warm_up, decay = max(2, own.steps // 20), round(own.steps * 0.7)
    return dict(
        model=base.model,
        load_from=own.weights,
        train_dataloader=train,
        val_dataloader=val,
        test_dataloader=val,
        val_evaluator=evaluator,
        test_evaluator=evaluator,
        optim_wrapper=wrapper,
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=warm_up),
            # The rate falls at the end only, so that a training can be continued.
            dict(type='LinearLR', end_factor=0.02, by_epoch=False, begin=decay, end=own.steps),
        ]
        if own.steps >= _SCHEDULED
        else [],
        train_cfg=dict(
            _delete_=True, type='IterBasedTrainLoop', max_iters=own.steps, val_interval=own.every
        ),
        default_hooks=dict(
            checkpoint=dict(
                _delete_=True, type='CheckpointHook', by_epoch=False, interval=own.every,
                max_keep_ckpts=1, save_best=measure, rule='greater',
            ),
            logger=dict(type='LoggerHook', interval=10),
        ),
        custom_hooks=[
            dict(
                type='EarlyStoppingHook', monitor=measure, rule='greater', min_delta=0.002,
                patience=own.patience,
            )
        ],
        log_processor=dict(type='LogProcessor', by_epoch=False, window_size=10),
        randomness=dict(seed=0),
        auto_scale_lr=None,
        tta_model=None,
        tta_pipeline=None,
    )  # fmt: skip


def _fit_model(base: Any, own: Any, task: Task) -> None:
    """Gives a model its number of classes and objects, its picture size, and its backbone."""
    model = base.model
    for key in class_counts(task.heads_of(base)):
        head = base
        for name in key.split('.'):
            head = head[int(name)] if name.isdigit() else head[name]
        head.num_classes = len(own.classes)
    model.backbone.update(own.backbone)
    if own.task == 'boxes' and model.type == 'MaskRCNN':
        model.type = 'FasterRCNN'
        model.roi_head.update(mask_head=None, mask_roi_extractor=None)
    if own.task in ('boxes', 'masks') and 'roi_head' in model:
        _fit_proposals(model, own.most)
    if own.task == 'maps':
        model.data_preprocessor.size = tuple(own.crop)
        model.test_cfg = dict(_delete_=True, mode='whole')
        for head in (model.decode_head, model.get('auxiliary_head')):
            # One process, which may be a CPU's.
            if head and (head.get('norm_cfg') or {}).get('type') == 'SyncBN':
                head.norm_cfg.type = 'BN'
    if own.task == 'classes':
        model.data_preprocessor = dict(
            model.get('data_preprocessor') or base.get('data_preprocessor') or {},
            num_classes=len(own.classes),
        )


def _fit_proposals(model: Any, most: int) -> None:
    """Gives a two-stage detector room for the objects of the fullest picture."""
    # Three proposals for each, and some to spare.
    proposals = max(50, 3 * most)
    testing, training = model.test_cfg, model.train_cfg
    for settings in (testing.rpn, training.rpn_proposal):
        settings.nms_pre = max(settings.nms_pre, 2 * proposals)
        settings.max_per_img = max(settings.max_per_img, proposals)
    if sampler := training.rcnn.get('sampler'):
        # A quarter of the proposals that are learned from are objects.
        sampler.num = max(sampler.num, 5 * most)
    testing.rcnn.max_per_img = max(testing.rcnn.max_per_img, math.ceil(1.5 * most))
