"""Checks the data that a config names: that it exists, and what a training learns of it.

Reads COCO's JSON (mmdet), label maps (mmsegmentation), and folders or lists of pictures
(mmpretrain), as the toolboxes' base data sets do. Data sets in other formats are skipped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from filecmp import cmp
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.registry import DATASETS

from mmvttt.errors import DataError, MissingDataError
from mmvttt.openmmlab.registry import type_name
from mmvttt.text import one_line

from ..tasks import class_counts, task_of
from .coco import check_coco
from .dataset_config import SPLITS, DatasetConfig
from .dropped import dropped_objects
from .findings import Findings
from .folders import check_folders
from .images import read_image
from .labels import check_labels

Sets = Sequence[DatasetConfig]


def check_data(cfg: Config, sets: Sets, splits: Sequence[str] = SPLITS) -> None:
    """Checks that the folders and annotation files that a config names exist, and make sense.

    Reads annotations for about a second (see `check_annotations`); tools/check_data.py reads all,
    and the images. Logs what a training would drop silently.

    Args:
        cfg: The config of a run.
        sets: Its data sets and metrics, of `datasets_of`.
        splits: Splits to check, of 'train', 'val', 'test'.

    Raises:
        MissingDataError: A folder or an annotation file does not exist.
        DataError: No class is a category, a file is not JSON, there is nothing to learn, a label is
            outside the classes, …, with a remedy.
    """
    for findings in check_annotations(cfg, sets, splits, thorough=False):
        if findings.errors:
            raise DataError(f'{findings.key}: {findings.errors[0]}')
        # All ranks read the same data; one of them logs.
        for warning in findings.warnings if os.environ.get('RANK', '0') == '0' else ():
            print_log(one_line(f'{findings.key}: {warning}'), 'current', logging.WARNING)


def _check_paths(sets: Sets, splits: Sequence[str]) -> None:
    """Raises a MissingDataError if a folder or an annotation file does not exist.

    Skips remote paths (`s3://…`), storage backends (`backend_args`) and downloaded data.
    """
    root = os.environ.get('MMVTTT_DATA', 'data/')
    for data in sets:
        for name, path in data.paths.items() if data.split in splits else ():
            if os.path.exists(path):
                continue
            variable = ', set the environment variable MMVTTT_DATA' if path.startswith(root) else ''
            kind, key = 'annotation file' if name == 'ann_file' else 'folder', f'{data.key}.{name}'
            raise MissingDataError(
                f'The {data.split} data is missing: the {kind} {path!r} does not exist (expected '
                f'at {os.path.abspath(path)}, named by {key}); put or link it there{variable}, or '
                f'point elsewhere with --cfg-options {key}=PATH'
            )


def check_annotations(
    cfg: Config,
    sets: Sets,
    splits: Sequence[str] = SPLITS,
    *,
    thorough: bool = True,
    images: bool = True,
) -> Iterator[Findings]:
    """Yields the findings in each data set of a supported format, as deep as `Findings` says.

    Takes the arguments of `check_data`, and raises its MissingDataError before the first finding.
    """
    checked: list[tuple[DatasetConfig, Findings]] = []
    _check_paths(sets, splits)
    for data in sets:
        format = data.format if data.split in splits and not data.metric else ''
        if not format or data.remote or data.config in [other.config for other, _ in checked]:
            continue
        findings = Findings(data.key, thorough, images and data.reads_files)
        try:
            # Without its pipeline, which a user's class may set itself, and not loaded yet.
            config = {**data.config, 'lazy_init': True, '_scope_': data.scope}
            dataset = DATASETS.build(config | ({'pipeline': []} if 'pipeline' in config else {}))
        except Exception as error:
            # A toolbox may raise any type of error for its own arguments.
            text = f'{data.config["type"]} cannot be built: {type(error).__name__}: {error}'
            findings.error(text)
        else:
            if isinstance(names := dataset.metainfo.get('classes'), str):
                findings.error(
                    f'metainfo.classes is the string {names!r}, whose letters would be the '
                    f'classes: write a tuple, classes=({names!r},)'
                )
            else:
                _CHECKS[format](cfg, sets, data, dataset, findings)
        for former, other in checked:
            _compare_files(former, other, data, findings)
        if checked and findings.classes is not None:
            _compare_classes(checked[0][1], findings)
        checked.append((data, findings))
        yield findings


def _check_boxes(
    cfg: Config, sets: Sets, data: DatasetConfig, dataset: Any, findings: Findings
) -> None:
    classes = dataset.metainfo.get('classes') or ()
    several = sum((other.split, other.metric) == (data.split, False) for other in sets) > 1
    # An evaluator of several sets may read all their annotations from one file.
    expected = '' if several else data.paths.get('ann_file', '')
    same = [other.split for other in sets if other.config == data.config]
    for metric in sets if expected else ():
        path = metric.paths.get('ann_file') if metric.metric and metric.split in same else None
        if path and os.path.realpath(path) != os.path.realpath(expected):
            (findings.error if findings.thorough else findings.warn)(
                f'{metric.key}.ann_file is {path!r}, and {data.key} reads {expected!r}: '
                'predictions are compared with the annotations of other images; set '
                f'{metric.key}.ann_file={expected}'
            )
    check_coco(
        dataset,
        findings,
        is_training=data.split == 'train',
        # One of several sets may have only images without a box.
        needs_boxes=data.split == 'train' and not several,
        masks=any(transform.get('with_mask') for _, transform in data.transforms),
        most=_most_objects(cfg),
    )
    if findings.thorough and findings.images and data.split == 'train' and not findings.errors:
        for text in dropped_objects(data):
            findings.warn(text)
    # The labels of a model of language and vision are numbers of words.
    measured = 'language_model' not in (cfg.get('model') or {}) and any(
        other.metric and other.kind == 'CocoMetric' for other in sets if other.split != 'train'
    )
    count = len(findings.classes or ())
    counts = class_counts(task_of(cfg).heads_of(cfg))
    _check_heads(counts, count, findings, max(count, len(classes)), measured)


def _most_objects(cfg: Config) -> tuple[str, int] | None:
    """The option that bounds the objects that a detector returns for a picture, and its value."""
    for option in ('test_cfg.rcnn.max_per_img', 'test_cfg.max_per_img', 'num_queries'):
        value: Any = cfg.get('model')
        for key in option.split('.'):
            value = value.get(key) if isinstance(value, Mapping) else None
        if type(value) is int:
            return f'model.{option}', value
    return None


def _check_maps(
    cfg: Config, sets: Sets, data: DatasetConfig, dataset: Any, findings: Findings
) -> None:
    classes, heads = dataset.metainfo.get('classes'), task_of(cfg).heads_of(cfg)
    for key, head in heads.items():
        _check_softmax(key, head, 'loss_decode', findings)
    # BCE has one channel for two classes.
    counts = {key: n for key, n in class_counts(heads).items() if n > 1}
    _check_heads(counts, len(classes or ()), findings, len(classes or ()))
    findings.classes = tuple(classes) if classes else None
    limits = [len(classes), *counts.values()] if classes else list(counts.values())
    if transform := data.foreign_transform:
        findings.warn(f'the numbers in the label maps are not checked: {transform} may change them')
        limits = []
    ignored = {head.get('ignore_index', 255) for head in heads.values()}
    check_labels(dataset, min(limits, default=None), findings, ignored or {255})


def _check_pictures(
    cfg: Config, sets: Sets, data: DatasetConfig, dataset: Any, findings: Findings
) -> None:
    heads = task_of(cfg).heads_of(cfg)
    counts = class_counts(heads)
    check_folders(dataset, next(iter(counts.values()), None), findings)
    resizing = (t for name, t in data.transforms if name.startswith(('Resize', 'Random')))
    first = next(resizing, {})
    crop = first.get('crop_size') if str(first.get('type')).endswith('RandomCrop') else None
    if isinstance(crop, int) and dataset.img_prefix:
        pictures = (path for path in Path(dataset.img_prefix).rglob('*.*') if path.is_file())
        size = next((read_image(os.fspath(path)).size for path in pictures), None)
        if size is not None and min(size) > 2 * crop:
            findings.error(
                f'RandomCrop cuts {crop} pixels out of pictures of {size[0]}×{size[1]}: put '
                f"dict(type='ResizeEdge', scale={crop}) before it in the pipeline"
            )
    # Mixup makes label vectors of the preprocessor's num_classes, which must match the head's.
    inside = (cfg.get('model') or {}).get('data_preprocessor')
    where = 'model.data_preprocessor' if inside else 'data_preprocessor'
    vectors = (inside or cfg.get('data_preprocessor') or {}).get('num_classes')
    for key, count in counts.items():
        _check_softmax(key, heads[key], 'loss', findings)
        if vectors not in (None, count):
            findings.error(
                f'{where}.num_classes is {vectors}, and {key}.num_classes {count}: set '
                'both to the number of classes'
            )


# By the format of a task's data sets.
_CHECKS = {'COCO': _check_boxes, 'maps': _check_maps, 'lists': _check_pictures}


def _check_softmax(key: str, head: Mapping, loss_key: str, findings: Findings) -> None:
    """Reports a softmax over one channel, which is always 1, so that the loss is 0."""
    losses = head.get(loss_key) or dict(type='CrossEntropyLoss')
    losses = losses if isinstance(losses, list | tuple) else [losses]
    softmax = all(
        type_name(loss.get('type') or '').rpartition('.')[2] == 'CrossEntropyLoss'
        and not loss.get('use_sigmoid')
        for loss in losses
    )
    if head.get('num_classes') == 1 == head.get('out_channels', 1) and softmax:
        findings.error(
            f'{key} has num_classes=1 and a softmax, whose loss is 0 for every picture: nothing '
            f'is learned; add a class for the rest, or set {key}.{loss_key}.use_sigmoid=True'
        )


def _check_heads(
    heads: Mapping[str, int], count: int, findings: Findings, most: int, measured: bool = False
) -> None:
    """Reports heads with too few classes, which fail at higher labels, or too many.

    A head takes the label after its last class for background. Masks of two-stage detectors have
    the labels of their boxes.
    """
    for key, classes in heads.items():
        text = f'{key} has num_classes={classes} for {count} classes of the data: '
        remedy = f'set num_classes={count} in all heads, or metainfo.classes in the data sets'
        if classes < count:
            findings.error(text + remedy)
        elif classes > most > 0:
            if measured and ('roi_head.' not in key or '.bbox_head' in key):
                findings.error(f'{text}CocoMetric fails at the others; {remedy}')
            else:
                findings.warn(f'{text}the others are not trained')


def _compare_classes(first: Findings, other: Findings) -> None:
    """Reports a label that means one class in training and another in evaluation."""
    if first.classes is None:
        return
    names, others = first.classes, other.classes or ()
    pairs = zip_longest(names, others)
    label = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if label is not None:
        there, here = (' '.join(map(repr, c[label : label + 1])) for c in (names, others))
        other.error(
            f'label {label} is {here or "nothing"} here and {there or "nothing"} in {first.key}: '
            'both need the same classes, in the same order'
        )


def _compare_files(
    former: DatasetConfig, first: Findings, data: DatasetConfig, other: Findings
) -> None:
    """Reports pictures that are both learned and measured."""
    # Lists of indices may divide one set.
    divided = any(d.divided for d in (former, data))
    if former.split != 'train' or data.split == 'train' or divided:
        return
    # A copy has the same name in another folder.
    names = {os.path.basename(path): path for path in first.files}
    pairs = [(p, names.get(os.path.basename(p), '')) for p in other.files - first.files]
    pairs = [pair for pair in pairs if all(map(os.path.isfile, pair))]
    copies = {path for path, twin in pairs if cmp(path, twin, shallow=False)}
    shared = first.files & other.files | copies
    if shared and os.path.isdir(min(shared)):
        other.warn(f'the folder {min(shared)!r} is also read by {first.key}, which learns it')
    elif shared:
        other.warn(
            f'{len(shared)} of {len(other.files)} pictures are also in {first.key}, which learns '
            f'them: the results on them say nothing about other pictures ({min(shared)}, …)'
        )
