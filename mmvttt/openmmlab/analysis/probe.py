"""Probes of a backbone of a config, and of its linearized twin, as tools/probe.py makes them."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
    IGNORED,
    class_folder,
    draw_cosines,
    labelled_images,
    neighbour_agreement,
    patch_features,
    patch_labels,
    patch_miou,
    pooled_features,
    probe,
)
from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.read import named_tensors, read_content, saved_classes
from mmvttt.errors import UsageError
from mmvttt.named_model import image_channels, preprocessed, read_picture
from mmvttt.outputs import check_new_folder

from ..config import load_config
from ..registry import MODELS

UNTRAINED = 'untrained'
# Where a config names no type, it is a classifier's.
_PREPROCESSOR = dict(type='mmpretrain.ClsDataPreprocessor')


def probe_models(
    model: str,
    train: Path,
    test: Path,
    checkpoint: str | None = None,
    key: str | None = None,
    twin: str | None = None,
    most: tuple[int, int] | None = None,
    batch_size: int = 50,
    out: Path = Path('work_dirs/probe'),
    shape: tuple[int, int] | None = None,
    maps: tuple[Path, Path] | None = None,
    ignore: int = IGNORED,
    cfg_options: dict[str, Any] | None = None,
) -> str:
    """Measures a model, and its twin with it; returns the table that it writes to `out`.

    Args:
        model: A config, the name of one of ours, or a vision transformer of timm's.
        train, test: Folders of classes; `most` images are taken, evenly of all classes. With
            `maps`, folders of images.
        checkpoint, key: Weights of the model; see `load_pretrained`.
        twin: Weights of the linearized model; `'untrained'` leaves what is new at random.
        batch_size: Images at a time.
        shape: Height and width that images are resized to.
        maps: Folders of label maps of `train` and `test`: a linear probe of patches is measured.
        ignore: Pixels of this number count for no class.

    Raises:
        DataError: If a folder is missing or has too few images.
        UsageError: If scikit-learn is missing, `out` cannot be written, the model has no weights,
            or its patches do not divide the shape.
    """
    if find_spec('sklearn') is None:
        raise UsageError("probes need scikit-learn: pip install 'mmvttt[demo]'")
    # Before a model is built.
    check_new_folder(out)
    counts = most or (None, None)
    if maps:
        pairs = [labelled_images(*p) for p in zip((train, test), maps, counts, strict=True)]
    else:
        sets = [class_folder(*pair) for pair in zip((train, test), counts, strict=True)]
        if sets[0][2] != sets[1][2]:
            raise UsageError(
                f'the classes of {train} and {test} differ: {sets[0][2]}, {sets[1][2]}'
            )
    backbone, preprocessor = _backbone(model, cfg_options)
    if not checkpoint and not backbone.get('init_cfg'):
        raise UsageError(f'{model} has random weights: give --checkpoint.')
    source = _built({**backbone, 'linearize': None} if 'model' in backbone else backbone)
    models = {'source': source}
    if checkpoint:
        load_pretrained(source, checkpoint, key=key)
    else:
        source.init_weights()
    if twin:
        linear = models['twin'] = _built(dict(backbone, linearize=backbone.get('linearize') or {}))
        linear.load_state_dict(source.state_dict(), strict=False)
        if twin != UNTRAINED:
            load_pretrained(linear, twin)
    size = (224, 224) if shape is None else (shape[0], shape[1])

    def prepare(picture: Tensor) -> Tensor:
        return preprocessed(picture, preprocessor, image_channels(source))

    def batches(files: Sequence[Path]) -> Iterator[Tensor]:
        for i in range(0, len(files), batch_size):
            part = files[i : i + batch_size]
            yield torch.stack([prepare(read_picture(path, size)) for path in part])

    if maps:
        rows = _patch_rows(models, batches, pairs, size, ignore)
    else:
        head = partial(_head, checkpoint, key)
        rows = _image_rows(models, batches, sets, head, out / 'cosine.png')
    table = io.StringIO()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(table, columns, lineterminator='\n')
    writer.writeheader()
    writer.writerows(
        {k: f'{v:.4f}' if isinstance(v, float) else v for k, v in row.items()} for row in rows
    )
    write_whole(out / 'probe.csv', table.getvalue().encode())
    return table.getvalue()


Batches = Callable[[Sequence[Path]], Iterator[Tensor]]


def _image_rows(
    models: Mapping[str, nn.Module],
    batches: Batches,
    sets: Sequence[tuple[list[Path], np.ndarray, list[str]]],
    head: Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray] | None],
    picture: Path,
) -> list[dict[str, Any]]:
    """Neighbours and linear probes of whole images, by model and kind of feature."""
    (train_files, labels, names), (test_files, truth, _) = sets
    classifier, rows, held = head(names), [], {}
    for name, network in models.items():
        learned, _ = pooled_features(network, batches(train_files))
        source = models['source'] if name == 'twin' else None
        seen, cosines = pooled_features(network, batches(test_files), source)
        held[name] = seen
        for kind, features in seen.items():
            row = dict(model=name, features=kind, **probe(learned[kind], labels, features, truth))
            if classifier is not None and kind == ('class' if 'class' in seen else 'mean'):
                weight, bias = classifier
                row['own_head'] = float(np.mean((features @ weight.T + bias).argmax(1) == truth))
            if name == 'twin':
                row['same_neighbours'] = neighbour_agreement(held['source'][kind], features)
                row |= {f'cosine_{i}': c for i, c in enumerate(cosines[:-1])}
                row['cosine_last'] = cosines[-1]
                draw_cosines(cosines.tolist(), picture)
            rows.append(row)
    return rows


def _patch_rows(
    models: Mapping[str, nn.Module],
    batches: Batches,
    sets: Sequence[tuple[list[Path], list[Path]]],
    size: tuple[int, int],
    ignore: int,
) -> list[dict[str, Any]]:
    """Linear probes of patches on label maps, by model."""
    side = models['source'].patch_size
    grid = size[0] // side, size[1] // side
    if (grid[0] * side, grid[1] * side) != size:
        raise UsageError(
            f'--shape {size[0]} {size[1]}: the labels of patches need multiples of {side} pixels.'
        )
    labels, truth = (
        np.concatenate([patch_labels(path, size, grid, ignore) for path in paths])
        for _, paths in sets
    )
    rows = []
    for name, network in models.items():
        learned, seen = (patch_features(network, batches(files)) for files, _ in sets)
        rows.append(dict(model=name, features='patches'))
        rows[-1]['miou'] = patch_miou(learned, labels, seen, truth)
    return rows


def _backbone(name: str, cfg_options: dict[str, Any] | None) -> tuple[dict[str, Any], Any]:
    """The config of a backbone, and what prepares images for it."""
    if timm.is_model(name):
        cfg = timm.get_pretrained_cfg(name)
        levels = dict(mean=[255 * x for x in cfg.mean], std=[255 * x for x in cfg.std])
        return (
            dict(type='mmvttt.TimmViT', model=name),
            ROOT.build(dict(_PREPROCESSOR, **levels, to_rgb=True)),
        )
    config = load_config(name, cfg_options=cfg_options)
    init_default_scope(config.get('default_scope', 'mmengine'))
    backbone = config.model.backbone.to_dict()
    # An adapter's is inside.
    options = config.model.get('data_preprocessor') or config.get('data_preprocessor') or {}
    built = ROOT.build({**_PREPROCESSOR, **options}) if options else None
    return backbone.get('backbone', backbone), built


def _built(config: dict[str, Any]) -> nn.Module:
    return MODELS.build(config).eval()


def _head(
    checkpoint: str | None, key: str | None, classes: Sequence[str]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Weight and bias of the linear head of a checkpoint, for these classes by their names."""
    if checkpoint is None:
        return None
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
