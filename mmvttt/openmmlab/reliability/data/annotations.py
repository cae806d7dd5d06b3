"""Checks the data sets that a config names: annotations against classes, files, images.

Reads COCO's JSON (mmdet), label maps (mmsegmentation), and folders or lists of pictures
(mmpretrain), as the toolboxes' base data sets do. Data sets with a format of their own are left
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope

from mmvttt.errors import DataError

from .coco import check_coco
from .dataset_config import (
    class_counts,
    heads_of,
    innermost,
    is_remote,
    known_kind,
    num_classes,
    own_transform,
    reads_files,
)
from .findings import Findings, Scope
from .folders import check_folders
from .labels import check_labels

_SPLITS = ('train', 'val', 'test')
# Where the toolboxes' models have heads that classify.
_DET_HEADS = (
    'roi_head.bbox_head', 'roi_head.mask_head', 'roi_head.mask_iou_head', 'roi_head.point_head',
    'bbox_head', 'mask_head', 'query_head', 'panoptic_head', 'panoptic_fusion_head',
)  # fmt: skip
_SEG_HEADS = ('decode_head', 'auxiliary_head')
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
        thorough: As of `Scope`, like the next two. What is quick: categories that are not the
            classes, files that are no JSON, nothing to learn, labels that are no class.
        images: Whether to decode the images, or to see whether some are there.
        progress: Wraps files on their way.

    Yields:
        Findings for each data set whose format is known.
    """
    seen = []
    first: Findings | None = None
    for split in splits:
        loader = cfg.get(f'{split}_dataloader') or {}
        sets = list(innermost(loader.get('dataset'), f'{split}_dataloader.dataset'))
        for place, config in sets:
            known = known_kind(config, cfg.get('default_scope', 'mmengine'))
            if config in seen or known is None or is_remote(config):
                continue
            seen.append(config)
            findings = Findings(place)
            scope = Scope(thorough, images and reads_files(config), progress)
            # One of several sets may well be of images without a box.
            training = split == 'train' and len(sets) == 1
            _check(known, config, cfg, training, findings, scope)
            if findings.classes is not None:
                first = first or findings
                _compare(first, findings)
            yield findings


def explain_failure(dataset: Mapping, error: Exception) -> DataError | None:
    """Explains, by its annotations, why a data set could not be built or read.

    Args:
        dataset: Its config.
        error: The error that it raised.

    Returns:
        The error that names them; None where nothing is wrong with them.
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
    toolbox: str, config: Mapping, cfg: Config, training: bool, findings: Findings, scope: Scope
) -> None:
    default_scope = cfg.get('default_scope')
    lazy = dict(config, pipeline=[], lazy_init=True, _scope_=default_scope)
    try:
        dataset = DATASETS.build(lazy)
    except Exception as error:
        # A toolbox may raise anything for its own arguments.
        findings.error(f'{config["type"]} cannot be built: {type(error).__name__}: {error}')
        return
    classes = dataset.metainfo.get('classes')
    if isinstance(classes, str):
        findings.error(
            f'metainfo.classes is the string {classes!r}, whose letters would be the classes: '
            f'write a tuple, classes=({classes!r},)'
        )
    elif toolbox == 'mmdet':
        steps = [t for t in config.get('pipeline') or () if isinstance(t, Mapping)]
        check_coco(
            dataset.ann_file,
            dataset.data_prefix.get('img') or '',
            classes or (),
            findings,
            scope,
            training=training,
            masks=any(t.get('with_mask') for t in steps),
        )
        _check_heads(
            class_counts(cfg, _DET_HEADS), len(findings.classes or ()), findings, len(classes or ())
        )
    elif toolbox == 'mmseg':
        # BCE has one channel for two classes.
        heads = [(k, n) for k, n in class_counts(cfg, _SEG_HEADS) if n > 1]
        _check_heads(heads, len(classes or ()), findings)
        findings.classes = tuple(classes) if classes else None
        known = [len(classes)] if classes else []
        known += [n for _, n in heads]
        if own := own_transform(config, default_scope):
            findings.warn(f'the numbers in the label maps are not checked: {own} may change them')
            known = []
        ignored = {head.get('ignore_index', 255) for _, head in heads_of(cfg, _SEG_HEADS)}
        check_labels(dataset, min(known, default=None), findings, scope, ignored or {255})
    else:
        check_folders(dataset, next(num_classes(cfg, 'head'), None), findings, scope)
        _check_one_hot(cfg, findings)


def _check_heads(
    heads: Iterable[tuple[str, int]], count: int, findings: Findings, most: int = 0
) -> None:
    """A head takes the label behind its last one for background, and fails at those after it."""
    for place, known in heads:
        if known < count:
            findings.error(
                f'{place} has num_classes={known} for {count} classes of the data: set '
                f'num_classes={count} in all heads, or metainfo.classes in the data sets'
            )
        elif known > max(count, most) > 0:
            findings.warn(
                f'{place} has num_classes={known} for {count} classes of the data: nothing '
                'trains the others'
            )


def _check_one_hot(cfg: Config, findings: Findings) -> None:
    """Mixup makes labels of as many numbers as the preprocessor knows, for those of the head."""
    model = cfg.get('model') or {}
    preprocessor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    made = preprocessor.get('num_classes')
    for known in num_classes(cfg, 'head'):
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
