"""Facts about the data sets of a config, read from the config alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from mmengine.config import Config
from mmengine.registry import DATASETS, TRANSFORMS

from mmvttt.checkpoints.preparation import both, of_preprocessor
from mmvttt.openmmlab.registry import resolve_type, type_name

from ..tasks import TASKS, task_of

SPLITS = ('train', 'val', 'test')
_PACKAGES = {'mmcv', 'mmengine', 'mmvttt', *(task.toolbox for task in TASKS)}
# Data sets of mmpretrain with an option `download`, which is True by default.
_DOWNLOADED = ('CIFAR10', 'CIFAR100', 'MNIST', 'FashionMNIST')
# Keys under which data sets of mmengine and the toolboxes wrap others.
_WRAPPED = ('dataset', 'datasets')


@dataclass(frozen=True)
class DatasetConfig:
    """The config of one data set, without its wrappers; or of a metric, which reads files too.

    Its dotted key is such as `train_dataloader.dataset`; its type is looked up in the scope. It is
    divided if `indices`, or a wrapper such as KFoldDataset, choose some of its pictures.
    """

    config: Mapping
    key: str = ''
    scope: str = 'mmengine'
    split: str = ''
    metric: bool = False
    divided: bool = False

    @property
    def kind(self) -> str:
        """The name of its class, without a scope."""
        return type_name(self.config.get('type') or '').rpartition('.')[2]

    @property
    def metainfo(self) -> dict[str, Any]:
        """Names and colours of the classes: the config's, else of its class."""
        kind = resolve_type(self.config.get('type'), DATASETS, self.scope)
        return {**(getattr(kind, 'METAINFO', None) or {}), **(self.config.get('metainfo') or {})}

    @property
    def transforms(self) -> list[tuple[str, Mapping]]:
        """The class name of each transform of the pipeline, without a scope, and its config."""
        return [
            (type_name(transform.get('type')).rpartition('.')[2], transform)
            for transform in self.config.get('pipeline') or ()
            if isinstance(transform, Mapping)
        ]

    @property
    def remote(self) -> bool:
        """Whether it may read from anywhere but the disk, or downloads what it lacks.

        A storage backend may map its paths to anywhere. CIFAR, MNIST and the like are downloaded.
        """
        config = self.config
        readers = [config, *(transform for _, transform in self.transforms)]
        backends = {(r.get('backend_args') or {}).get('backend', 'local') for r in readers}
        paths = (config.get('data_root'), config.get('ann_file'), config.get('data_prefix'))
        downloads = self.kind in _DOWNLOADED
        return (
            backends != {'local'}
            or any('://' in str(path) for path in paths)
            or (downloads and config.get('download', True))
        )

    @property
    def reads_label_maps(self) -> bool:
        """Whether the label maps that it names are loaded.

        A pipeline for instances ignores mmdet's `data_prefix.seg` (PNGs of COCO panoptic), which
        its config may inherit from a panoptic one.
        """
        prefixes = self.config.get('data_prefix')
        if not isinstance(prefixes, Mapping) or 'seg' not in prefixes:
            return True
        return any(
            name == 'LoadPanopticAnnotations' or transform.get('with_seg')
            for name, transform in self.transforms
        )

    @property
    def reads_files(self) -> bool:
        """Whether the images are files with the names in the annotations, of common formats."""
        loaders = [options for name, options in self.transforms if name == 'LoadImageFromFile']
        tiff = any(options.get('imdecode_backend') == 'tifffile' for options in loaders)
        return not tiff and (bool(loaders) or not self.transforms)

    @property
    def format(self) -> str:
        """The format of a task, see `Task`, or '' for another."""
        kind = self.config.get('type')
        if isinstance(kind, str):
            with DATASETS.switch_scope_and_registry(self.scope) as registry:
                kind = registry.get(kind)
        if not isinstance(kind, type):
            return ''
        # The checks build it without loading it.
        parameters = signature(kind).parameters.values()
        if not any(p.name == 'lazy_init' or p.kind == p.VAR_KEYWORD for p in parameters):
            return ''
        for base in kind.__mro__:
            for task in TASKS:
                name, methods = task.dataset
                if (base.__module__.partition('.')[0], base.__name__) == (task.toolbox, name):
                    inherited = all(getattr(kind, m) is getattr(base, m) for m in methods)
                    return task.format if inherited else ''
        return ''

    @property
    def foreign_transform(self) -> str | None:
        """The first transform of the pipeline that no toolbox provides, or None."""
        with TRANSFORMS.switch_scope_and_registry(self.scope) as registry:
            for transform in self.config.get('pipeline') or ():
                kind = transform.get('type') if isinstance(transform, Mapping) else transform
                built = registry.get(kind) if isinstance(kind, str) else kind
                if getattr(built, '__module__', '').partition('.')[0] not in _PACKAGES:
                    return str(kind)
        return None

    @property
    def paths(self) -> dict[str, str]:
        """The path at each key of what it reads, the root first; empty if `remote`."""
        if self.remote:
            return {}
        # Not in the root.
        expand = os.path.expanduser if task_of({'default_scope': self.scope}).expands_home else str
        root = self.config.get('data_root') or ''
        paths = {'data_root': root} if root else {}
        annotations = self.config.get('ann_file') or ''
        if isinstance(annotations, str) and annotations:
            paths['ann_file'] = os.path.join(root, expand(annotations))
        prefixes = self.config.get('data_prefix') or {}
        for name, prefix in ({'': prefixes} if isinstance(prefixes, str) else prefixes).items():
            if prefix and (name != 'seg' or self.reads_label_maps):
                key = f'data_prefix.{name}' if name else 'data_prefix'
                paths[key] = os.path.join(root, expand(prefix))
        return paths


def datasets_of(cfg: Mapping | Config, splits: Sequence[str] = SPLITS) -> list[DatasetConfig]:
    """The data sets of some splits, each followed by its metrics."""
    scope = cfg.get('default_scope') or 'mmengine'
    sets: list[DatasetConfig] = []
    for split in splits:
        loader = cfg.get(f'{split}_dataloader') or {}
        sets += innermost(loader.get('dataset'), f'{split}_dataloader.dataset', scope, split)
        key = f'{split}_evaluator'
        sets += innermost(cfg.get(key), key, scope, split, metric=True)
    return sets


def preparation_of(cfg: Mapping | Config, split: str, preprocessor: Any) -> Any:
    """The model's preprocessor, or options as of one that also does a pipeline's `Normalize`."""
    pipelines = [d.transforms for d in datasets_of(cfg, (split,)) if not d.metric]
    steps = (step for pipeline in pipelines for name, step in pipeline if name == 'Normalize')
    step = next(steps, None)
    if step is None:
        return preprocessor
    done = both(of_preprocessor({'to_rgb': True, **step}), of_preprocessor(preprocessor or {}))
    mean, std = ([255 * x for x in values] for values in done[:2])
    return {'mean': mean, 'std': std, 'to_rgb': done.swapped}


def innermost(config: Any, key: str = '', *facts: Any, **flags: Any) -> Iterator[DatasetConfig]:
    """Yields the data sets that RepeatDataset, ConcatDataset and the like wrap.

    `facts` are the scope and the split.
    """
    if isinstance(config, list | tuple):
        for index, inner in enumerate(config):
            yield from innermost(inner, f'{key}.{index}', *facts, **flags)
    elif isinstance(config, Mapping):
        wrapped = [name for name in _WRAPPED if name in config]
        if 'fold' in config or not isinstance(config.get('indices') or 0, int):
            flags['divided'] = True
        for name in wrapped:
            yield from innermost(config[name], f'{key}.{name}', *facts, **flags)
        if not wrapped:
            yield DatasetConfig(config, key, *facts, **flags)
