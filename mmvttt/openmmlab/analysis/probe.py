"""Probes of a config's backbone, and of its linearized twin, as tools/probe.py makes them."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from mmengine.registry import MODELS as ROOT
from mmengine.registry import init_default_scope
from torch import Tensor, nn

from mmvttt.analysis.probe import (
    features_of,
    neighbour_agreement,
    patch_labels,
    patch_miou,
    probe,
    token_cosines,
)
from mmvttt.analysis.tables import write_csv
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.read import named_tensors, read_content, saved_classes
from mmvttt.errors import DataError, UsageError
from mmvttt.named_model import image_channels, preprocessed, read_picture
from mmvttt.outputs import check_new_folder
from mmvttt.pictures import SUFFIXES

from ..config import load_config
from ..registry import MODELS

# Images of a forward pass.
_BATCH = 50
# Where a config names no type, it is a classifier's.
_PREPROCESSOR = dict(type='mmpretrain.ClsDataPreprocessor')


def probe_models(
    model: str,
    train: Path,
    test: Path,
    checkpoint: str | None = None,
    key: str | None = None,
    twin: str | None = None,
    most: Sequence[int | None] = (None, None),
    out: Path = Path('work_dirs/probe'),
    shape: Sequence[int] = (224, 224),
    maps: tuple[Path, Path] | None = None,
    cfg_options: dict[str, Any] | None = None,
) -> str:
    """Measures a model, and its twin with it; returns the table that it writes to `out`.

    Args:
        model: A config, the name of one of ours, or a vision transformer of timm's.
        train, test: Folders of classes; `most` images are taken, evenly of all classes.
        checkpoint, key: Weights of the model; see `load_pretrained`.
        twin: Weights of the linearized model; 'untrained' leaves new ones at random.
        shape: Height and width to which images are resized.
        maps: Folders of `.png` label maps in the layout of `train` and `test`, for a probe of
            patches instead.

    Raises:
        DataError: If a folder is missing or has too few images.
        UsageError: If scikit-learn is missing, `out` cannot be written, the classes of the folders
            differ, the model has no weights, or its patches do not divide the shape.
    """
    if find_spec('sklearn') is None:
        raise UsageError("probes need scikit-learn: pip install 'mmvttt[demo]'")
    # Before a model is built.
    check_new_folder(out)
    files = [_images(*pair) for pair in zip((train, test), most, strict=True)]
    if maps is None:
        classes = [sorted({path.parent.name for path in paths}) for paths in files]
        if classes[0] != classes[1] or len(classes[0]) < 2:
            raise UsageError(
                f'{train} and {test} need the same classes, two or more, as FOLDER/CLASS/*.jpg; '
                f'they have {classes[0]} and {classes[1]}'
            )
    backbone, preprocessor = _backbone(model, cfg_options)
    if not checkpoint and not backbone.get('init_cfg'):
        raise UsageError(f'{model} has random weights: give --checkpoint.')
    source = MODELS.build({**backbone, 'linearize': None} if 'model' in backbone else backbone)
    models: dict[str, nn.Module] = {'source': source.eval()}
    if checkpoint:
        load_pretrained(source, checkpoint, key=key)
    else:
        source.init_weights()
    if twin:
        linear = MODELS.build(dict(backbone, linearize=backbone.get('linearize') or {}))
        models['twin'] = linear.eval()
        linear.load_state_dict(source.state_dict(), strict=False)
        if twin != 'untrained':
            load_pretrained(linear, twin)

    def batches(files: Sequence[Path]) -> Iterator[Tensor]:
        for i in range(0, len(files), _BATCH):
            pictures = [read_picture(path, (shape[0], shape[1])) for path in files[i : i + _BATCH]]
            channels = image_channels(source)
            yield torch.stack([preprocessed(p, preprocessor, channels) for p in pictures])

    features = {
        name: [features_of(model, batches(paths), maps is not None) for paths in files]
        for name, model in models.items()
    }
    rows: list[dict[str, Any]] = []
    if maps is not None:
        roots = zip(files, (train, test), maps, strict=True)
        labels, truth = (_patch_labels(*part, shape, source.patch_size) for part in roots)
        for name, (learned, seen) in features.items():
            miou = patch_miou(learned['patches'], labels, seen['patches'], truth)
            rows.append(dict(model=name, features='patches', miou=miou))
    else:
        names = classes[0]
        labels, truth = (np.array([names.index(p.parent.name) for p in paths]) for paths in files)
        head = _head(checkpoint, key, names) if checkpoint else None
        for name, (learned, seen) in features.items():
            for kind, x in seen.items():
                row = dict(model=name, features=kind, **probe(learned[kind], labels, x, truth))
                if head is not None and kind == ('class' if 'class' in seen else 'mean'):
                    row['own_head'] = float(np.mean((x @ head[0].T + head[1]).argmax(1) == truth))
                if name == 'twin':
                    row['same_neighbours'] = neighbour_agreement(features['source'][1][kind], x)
                rows.append(row)
        if twin:
            cosines = token_cosines(linear, source, batches(files[1]))
            blocks = {f'cosine_{i}': c for i, c in enumerate(cosines[:-1])}
            for row in rows[len(rows) // 2 :]:
                row |= {**blocks, 'cosine_last': cosines[-1]}
    rows = [{k: f'{v:.4f}' if isinstance(v, float) else v for k, v in r.items()} for r in rows]
    return write_csv(rows, out / 'probe.csv').read_text()


def _images(root: Path, most: int | None) -> list[Path]:
    """Images of a folder and those below it; evenly at most so many."""
    paths = sorted(p for p in root.rglob('*') if p.suffix.lower() in SUFFIXES)
    if not paths:
        raise DataError(f'there are no images in {str(root)!r}: give FOLDER/CLASS/*.jpg.')
    count = min(most or len(paths), len(paths))
    return [paths[i * len(paths) // count] for i in range(count)]


def _patch_labels(
    images: Sequence[Path], root: Path, maps: Path, shape: Sequence[int], side: int
) -> np.ndarray:
    """Classes of all patches, by label maps with the names of the images."""
    if shape[0] % side or shape[1] % side:
        raise UsageError(f'--shape {shape[0]} {shape[1]}: give multiples of {side} pixels.')
    paths = [(maps / path.relative_to(root)).with_suffix('.png') for path in images]
    if missing := [path for path in paths if not path.is_file()]:
        raise DataError(f'there is no label map {str(missing[0])!r}: give one for each image.')
    return np.concatenate([patch_labels(path, (shape[0], shape[1]), side) for path in paths])


def _backbone(name: str, cfg_options: dict[str, Any] | None) -> tuple[dict[str, Any], Any]:
    """The config of a backbone, and the preprocessor of its images."""
    if timm.is_model(name):
        cfg = timm.get_pretrained_cfg(name)
        levels = dict(mean=[255 * x for x in cfg.mean], std=[255 * x for x in cfg.std])
        preprocessor = ROOT.build(dict(_PREPROCESSOR, **levels, to_rgb=True))
        return dict(type='mmvttt.TimmViT', model=name), preprocessor
    config = load_config(name, cfg_options=cfg_options)
    init_default_scope(config.get('default_scope', 'mmengine'))
    backbone = config.model.backbone.to_dict()
    options = config.model.get('data_preprocessor') or config.get('data_preprocessor') or {}
    built = ROOT.build({**_PREPROCESSOR, **options}) if options else None
    # An adapter's is inside.
    return backbone.get('backbone', backbone), built


def _head(
    checkpoint: str, key: str | None, classes: Sequence[str]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Weight and bias of the linear head of a checkpoint, for these classes by their names."""
    content = read_content(checkpoint)
    names = saved_classes(content)
    if not {*classes} <= {*names}:
        return None
    weights = named_tensors(content, checkpoint, key=key)
    rows = [names.index(name) for name in classes]
    for name in ('head.fc', 'head'):
        weight, bias = (weights.get(f'{name}.{part}') for part in ('weight', 'bias'))
        if weight is not None and bias is not None and weight.shape[0] == len(names):
            return weight[rows].float().numpy(), bias[rows].float().numpy()
    return None
