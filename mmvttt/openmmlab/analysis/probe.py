"""Probes of a backbone of a config, and of its linearized twin, as tools/probe.py makes them."""

import csv
import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from mmengine.registry import init_default_scope
from torch import Tensor, nn

from mmvttt.analysis.pictures import MEAN, STD, read_image
from mmvttt.analysis.probe import (
    class_folder,
    draw_cosines,
    neighbour_agreement,
    pooled_features,
    probe,
)
from mmvttt.checkpoints.atomic_write import write_whole
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.read import read_weights
from mmvttt.errors import UsageError

from ..config import load_config
from ..registry import MODELS

UNTRAINED = 'untrained'


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
    cfg_options: dict[str, Any] | None = None,
) -> str:
    """Measures a model, and its twin beside it; returns the table that it writes to `out`.

    Args:
        model: A config, the name of one of ours, or a vision transformer of timm's.
        train, test: Folders of classes; the first `most` are taken, evenly of all classes.
        checkpoint, key: Weights of the model; see `load_pretrained`.
        twin: Weights of the linearized model; `'untrained'` leaves what is new at random.
        batch_size: Images at a time.
        shape: Height and width that images are resized to.

    Raises:
        UsageError: If scikit-learn is missing, or the model has no weights.
    """
    if find_spec('sklearn') is None:
        raise UsageError("probes need scikit-learn: pip install 'mmvttt[demo]'")
    backbone, mean, std = _backbone(model, cfg_options)
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
    size = tuple(shape or (224, 224))
    sets = [
        class_folder(root, n) for root, n in zip((train, test), most or (None, None), strict=True)
    ]
    if sets[0][2] != sets[1][2]:
        raise UsageError(f'the classes of {train} and {test} differ: {sets[0][2]}, {sets[1][2]}')
    (train_files, labels, names), (test_files, truth, _) = sets
    head = _head(checkpoint, key, len(names))
    rows, held = [], {}
    for name, network in models.items():

        def batches(files: Sequence[Path]) -> Iterator[Tensor]:
            for i in range(0, len(files), batch_size):
                part = files[i : i + batch_size]
                yield torch.stack([read_image(path, size, mean, std)[1] for path in part])

        learned, _ = pooled_features(network, batches(train_files))
        seen, cosines = pooled_features(
            network, batches(test_files), source if name == 'twin' else None
        )
        held[name] = seen
        for kind, features in seen.items():
            row = dict(model=name, features=kind, **probe(learned[kind], labels, features, truth))
            if head is not None and kind == ('class' if 'class' in seen else 'mean'):
                weight, bias = head
                row['own_head'] = float(np.mean((features @ weight.T + bias).argmax(1) == truth))
            if name == 'twin':
                row['same_neighbours'] = neighbour_agreement(held['source'][kind], features)
                row |= {f'cosine_{i}': c for i, c in enumerate(cosines[:-1])}
                row['cosine_last'] = cosines[-1]
                draw_cosines(cosines.tolist(), out / 'cosine.png')
            rows.append(row)
    table = io.StringIO()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(table, columns, lineterminator='\n')
    writer.writeheader()
    writer.writerows(
        {k: f'{v:.4f}' if isinstance(v, float) else v for k, v in row.items()} for row in rows
    )
    write_whole(out / 'probe.csv', table.getvalue().encode())
    return table.getvalue()


def _backbone(
    name: str, cfg_options: dict[str, Any] | None
) -> tuple[dict[str, Any], Sequence[float], Sequence[float]]:
    """The config of a backbone, and mean and deviation of its images in [0, 1]."""
    if timm.is_model(name):
        cfg = timm.get_pretrained_cfg(name)
        return dict(type='mmvttt.TimmViT', model=name), cfg.mean, cfg.std
    config = load_config(name, cfg_options=cfg_options)
    init_default_scope(config.get('default_scope', 'mmengine'))
    own = config.model.get('data_preprocessor') or config.get('data_preprocessor') or {}
    statistics = [[x / 255 for x in own[k]] if k in own else None for k in ('mean', 'std')]
    backbone = config.model.backbone.to_dict()
    # An adapter's is inside.
    return backbone.get('backbone', backbone), statistics[0] or MEAN, statistics[1] or STD


def _built(config: dict[str, Any]) -> nn.Module:
    return MODELS.build(config).eval()


def _head(
    checkpoint: str | None, key: str | None, classes: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Weight and bias of the linear head of a checkpoint, if it has one for so many classes."""
    weights = read_weights(checkpoint, key=key) if checkpoint else {}
    for name in ('head.fc', 'head'):
        weight, bias = (weights.get(f'{name}.{part}') for part in ('weight', 'bias'))
        if weight is not None and bias is not None and weight.shape[0] == classes:
            return weight.float().numpy(), bias.float().numpy()
    return None
