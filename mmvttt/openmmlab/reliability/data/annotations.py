"""Checks the data sets that a config names: annotations against classes, files, images.

Reads COCO's JSON (mmdet), label maps (mmsegmentation), and folders or lists of pictures
(mmpretrain), as the toolboxes' base data sets do. Data sets in other formats are skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from mmengine.config import Config
from mmengine.registry import DefaultScope

from mmvttt.errors import DataError
from mmvttt.openmmlab.registry import type_name

from .coco import check_coco
from .dataset_config import DatasetConfig, class_counts, datasets_of, heads_of
from .findings import Findings, Scope
from .folders import check_folders
from .labels import check_labels

_SPLITS = ('train', 'val', 'test')
# Keys of the classifying heads in the toolboxes' models.
_HEADS = {
    'mmdet': (
        'roi_head.bbox_head', 'roi_head.mask_head', 'roi_head.mask_iou_head', 'roi_head.point_head',
        'bbox_head', 'mask_head', 'query_head', 'panoptic_head', 'panoptic_fusion_head',
    ),
    'mmseg': ('decode_head', 'auxiliary_head'),
    'mmpretrain': ('head',),
}  # fmt: skip
# Kinds of errors in a message.
_NAMED = 3


def check_annotations(
    cfg: Config,
    splits: Sequence[str] = _SPLITS,
    *,
    thorough: bool = True,
    images: bool = True,
    progress: Callable[..., Iterable] = lambda items, **_: items,
) -> Iterator[Findings]:
    """Checks the data sets of a config, each once.

    Args:
        cfg: A config whose files exist (see `check_data`).
        splits: Some of 'train', 'val', 'test'.
        thorough: See `Scope`, also for the next two. Quick checks find categories that are not the
            classes, files that are not JSON, data without anything to learn, and labels outside the
            classes.
        images: Whether to decode the images, or only check that some exist.
        progress: Wraps the iteration over files.

    Yields:
        Findings for each data set whose format is known.
    """
    seen = []
    first: Findings | None = None
    measured = _measured_by_coco(cfg)
    for split in splits:
        sets = datasets_of(cfg, split)
        for data in sets:
            toolbox = data.toolbox
            if data.config in seen or toolbox is None or data.remote:
                continue
            seen.append(data.config)
            findings = Findings(data.place)
            scope = Scope(thorough, images and data.reads_files, progress)
            # One of several sets may have only images without a box.
            training = split == 'train' and len(sets) == 1
            _check(data, _heads(cfg, toolbox), training, findings, scope, measured)
            if toolbox == 'mmseg' and split == 'train':
                _check_crop(cfg, data, findings)
            if toolbox == 'mmpretrain':
                _check_one_hot(cfg, findings)
            if findings.classes is not None:
                first = first or findings
                _compare(first, findings)
            yield findings


def explain_failure(dataset: Mapping, error: Exception) -> DataError | None:
    """Explains from its annotations why a data set could not be built or read.

    Args:
        dataset: Its config.
        error: The error that it raised.

    Returns:
        An error that names the faults; None if the annotations have none.
    """
    current = DefaultScope.get_current_instance()
    scope = dataset.get('_scope_') or (current.scope_name if current else 'mmengine')
    loader = dict(dataset=copy.deepcopy(dict(dataset)))
    cfg = Config(dict(default_scope=scope, train_dataloader=loader))
    for findings in check_annotations(cfg, ('train',), images=False):
        if findings.errors:
            found = '; '.join(findings.errors[:_NAMED])
            return DataError(
                f'{dataset.get("type")} stops with {type(error).__name__}: {error}. Wrong in '
                f'{findings.summary or "its annotations"}: {found}; tools/check_data.py names all'
            )
    return None


def _check(
    data: DatasetConfig,
    heads: Mapping[str, Mapping],
    training: bool,
    findings: Findings,
    scope: Scope,
    measured: bool,
) -> None:
    try:
        dataset = data.build()
    except Exception as error:
        # A toolbox may raise any type of error for its own arguments.
        kind = data.config['type']
        findings.error(f'{kind} cannot be built: {type(error).__name__}: {error}')
        return
    counts = class_counts(heads)
    classes = dataset.metainfo.get('classes')
    if isinstance(classes, str):
        findings.error(
            f'metainfo.classes is the string {classes!r}, whose letters would be the classes: '
            f'write a tuple, classes=({classes!r},)'
        )
    elif data.toolbox == 'mmdet':
        check_coco(
            dataset.ann_file,
            dataset.data_prefix.get('img') or '',
            classes or (),
            findings,
            scope,
            training=training,
            masks=any(transform.get('with_mask') for _, transform in data.transforms()),
        )
        most = max(len(findings.classes or ()), len(classes or ()))
        _check_heads(counts, len(findings.classes or ()), findings, most, measured)
    elif data.toolbox == 'mmseg':
        # BCE has one channel for two classes.
        counts = {place: n for place, n in counts.items() if n > 1}
        _check_heads(counts, len(classes or ()), findings, len(classes or ()))
        findings.classes = tuple(classes) if classes else None
        known = [len(classes), *counts.values()] if classes else list(counts.values())
        if own := data.own_transform:
            findings.warn(f'the numbers in the label maps are not checked: {own} may change them')
            known = []
        ignored = {head.get('ignore_index', 255) for head in heads.values()}
        check_labels(dataset, min(known, default=None), findings, scope, ignored or {255})
    else:
        check_folders(dataset, next(iter(counts.values()), None), findings, scope)


def _heads(cfg: Config, toolbox: str) -> dict[str, Mapping]:
    return heads_of(cfg, _HEADS[toolbox])


def _measured_by_coco(cfg: Config) -> bool:
    """Whether a CocoMetric, which fails at labels without a category, measures the heads' labels.

    The labels of a model of language and vision are numbers of words.
    """
    metrics = [m for split in ('val', 'test') for m in datasets_of(cfg, split, 'evaluator')]
    kinds = [type_name(m.config.get('type') or '').rpartition('.')[2] for m in metrics]
    return 'CocoMetric' in kinds and 'language_model' not in (cfg.get('model') or {})


def _check_heads(
    heads: Mapping[str, int], count: int, findings: Findings, most: int, measured: bool = False
) -> None:
    """A head takes the label after its last class for background, and fails at higher ones.

    Masks of two-stage detectors have the labels of their boxes.
    """
    for place, known in heads.items():
        text = f'{place} has num_classes={known} for {count} classes of the data: '
        remedy = f'set num_classes={count} in all heads, or metainfo.classes in the data sets'
        if known < count:
            findings.error(text + remedy)
        elif known > most > 0:
            if measured and ('roi_head.' not in place or '.bbox_head' in place):
                findings.error(f'{text}CocoMetric fails at the others; {remedy}')
            else:
                findings.warn(f'{text}the others are not trained')


def _preprocessor(cfg: Config) -> Mapping:
    model = cfg.get('model') or {}
    return model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}


def _check_crop(cfg: Config, data: DatasetConfig, findings: Findings) -> None:
    """Crops are padded to the preprocessor's size."""
    crops = [t.get('crop_size') for name, t in data.transforms() if name == 'RandomCrop']
    size = _preprocessor(cfg).get('size')
    if not crops or not crops[-1] or not size:
        return
    crop = (crops[-1],) * 2 if isinstance(crops[-1], int) else tuple(crops[-1])
    if any(a < b for a, b in zip(crop, size, strict=False)):
        findings.warn(
            f'RandomCrop cuts images to crop_size={crop}, and model.data_preprocessor.size='
            f'{tuple(size)} pads them to that: the padding is computed, and not learned; set '
            f'model.data_preprocessor.size={crop}'
        )


def _check_one_hot(cfg: Config, findings: Findings) -> None:
    """Mixup makes label vectors of the preprocessor's num_classes, which must match the head's."""
    made = _preprocessor(cfg).get('num_classes')
    for known in class_counts(_heads(cfg, 'mmpretrain')).values():
        if made is not None and made != known:
            findings.error(
                f'data_preprocessor.num_classes is {made}, and model.head.num_classes {known}: set '
                'both to the number of classes'
            )


def _compare(first: Findings, other: Findings) -> None:
    """Labels must mean the same in training and in evaluation."""
    names, others = first.classes or (), other.classes or ()
    pairs = zip_longest(names, others)
    label = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if label is not None:
        there, here = (' '.join(map(repr, c[label : label + 1])) for c in (names, others))
        other.error(
            f'label {label} is {here or "nothing"} here and {there or "nothing"} in {first.place}: '
            'both need the same classes, in the same order'
        )
