"""Facts about the data sets of a config, read from the config alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmengine.config import Config
from mmengine.registry import DATASETS, TRANSFORMS

from mmvttt.openmmlab.registry import type_name

_TOOLBOXES = ('mmcv', 'mmengine', 'mmdet', 'mmseg', 'mmpretrain', 'mmvttt')
# Data sets of mmpretrain with an option `download`, which is True by default.
_DOWNLOADED = ('CIFAR10', 'CIFAR100', 'MNIST', 'FashionMNIST')
# Keys under which data sets of mmengine and the toolboxes wrap others.
_WRAPPED = ('dataset', 'datasets')
# The data set of each toolbox whose format is known, and the methods that define the format.
_KNOWN = {
    ('mmdet', 'CocoDataset'): ('load_data_list', 'parse_data_info'),
    ('mmseg', 'BaseSegDataset'): ('load_data_list',),
    ('mmpretrain', 'CustomDataset'): ('load_data_list', '_find_samples'),
}


def innermost(config: Any, place: str) -> Iterator[tuple[str, Mapping]]:
    """The innermost data sets (or metrics) of a config, with the dotted key of each."""
    if isinstance(config, list | tuple):
        for index, inner in enumerate(config):
            yield from innermost(inner, f'{place}.{index}')
    elif isinstance(config, Mapping):
        wrapped = [key for key in _WRAPPED if key in config]
        for key in wrapped:
            yield from innermost(config[key], f'{place}.{key}')
        if not wrapped:
            yield place, config


def is_remote(config: Mapping) -> bool:
    """Whether a data set or metric may read elsewhere than on the disk, or fetches what it lacks.

    A storage backend may map its paths to anywhere. CIFAR, MNIST and the like are downloaded.
    """
    readers = [config, *(transform for _, transform in _transforms(config))]
    backends = {(reader.get('backend_args') or {}).get('backend', 'local') for reader in readers}
    paths = (config.get('data_root'), config.get('ann_file'), config.get('data_prefix'))
    downloads = type_name(config.get('type')).rpartition('.')[2] in _DOWNLOADED
    return (
        backends != {'local'}
        or any('://' in str(path) for path in paths)
        or (downloads and config.get('download', True))
    )


def reads_label_maps(config: Mapping) -> bool:
    """Whether label maps that a data set names are loaded.

    Those of mmdet's `data_prefix.seg` (PNGs of COCO panoptic) are left alone by a pipeline for
    instances, where its config inherits them from a panoptic one.
    """
    prefixes = config.get('data_prefix')
    if not isinstance(prefixes, Mapping) or 'seg' not in prefixes:
        return True
    return any(
        name == 'LoadPanopticAnnotations' or transform.get('with_seg')
        for name, transform in _transforms(config)
    )


def reads_files(config: Mapping) -> bool:
    """Whether the images are files by the names that the annotations give them."""
    names = [name for name, _ in _transforms(config)]
    return not names or 'LoadImageFromFile' in names


def _transforms(config: Mapping) -> Iterator[tuple[str, Mapping]]:
    """The name of the class of each transform of a pipeline, without a scope, and its config."""
    for transform in config.get('pipeline') or ():
        if isinstance(transform, Mapping):
            yield type_name(transform.get('type')).rpartition('.')[2], transform


def known_kind(config: Mapping, scope: str) -> str | None:
    """The toolbox whose format a data set has, or None."""
    kind = config.get('type')
    if isinstance(kind, str):
        with DATASETS.switch_scope_and_registry(scope) as registry:
            kind = registry.get(kind)
    if not isinstance(kind, type):
        return None
    for base in kind.__mro__:
        toolbox = base.__module__.partition('.')[0]
        methods = _KNOWN.get((toolbox, base.__name__))
        if methods is not None:
            own = all(getattr(kind, m) is getattr(base, m) for m in methods)
            return toolbox if own else None
    return None


def own_transform(config: Mapping, scope: str) -> str | None:
    """The first transform of a pipeline that is not one of the toolboxes, or None."""
    with TRANSFORMS.switch_scope_and_registry(scope) as registry:
        for transform in config.get('pipeline') or ():
            kind = transform.get('type') if isinstance(transform, Mapping) else transform
            known = registry.get(kind) if isinstance(kind, str) else kind
            if getattr(known, '__module__', '').partition('.')[0] not in _TOOLBOXES:
                return str(kind)
    return None


def heads_of(cfg: Config, names: Iterable[str]) -> Iterator[tuple[str, Mapping]]:
    """Parts of the model by their dotted keys; a part may be a list (a cascade)."""
    for name in names:
        part = cfg.get('model') or {}
        for key in name.split('.'):
            part = part.get(key) or {} if isinstance(part, Mapping) else {}
        several = isinstance(part, list | tuple)
        for index, head in enumerate(part if several else [part]):
            if isinstance(head, Mapping) and head:
                yield f'model.{name}.{index}' if several else f'model.{name}', head


def class_counts(cfg: Config, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Keys of heads, and how many classes they tell apart; a head that does not has none."""
    for place, head in heads_of(cfg, names):
        count = head.get('num_classes', head.get('num_things_classes'))
        if type(count) is int and not head.get('class_agnostic'):
            yield place, count


def num_classes(cfg: Config, name: str) -> Iterator[int]:
    """`num_classes` of a part of the model."""
    return (count for _, count in class_counts(cfg, (name,)))
