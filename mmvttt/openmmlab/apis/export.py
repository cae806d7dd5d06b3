"""Deployment: the model of a config and its weights as a file, compared with eager."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmvttt.checkpoints.read import read_content, saved_dataset
from mmvttt.deploy.export import require_format
from mmvttt.deploy.model_file import Comparison, write_model
from mmvttt.deploy.runtime import Runs
from mmvttt.errors import UsageError
from mmvttt.named_model import NamedModel

from ..data.dataset_config import datasets_of
from ..export.networks import Labels, as_outputs, samples_of
from ..models.diffusion_model import TAKES_NO_PHOTOGRAPHS, DiffusionModel
from ..tasks import picture_size, task_of

# Bounds of detections: pixels, score, share without a counterpart, as one more box may pass a
# threshold, and share of pixels of masks or label maps.
_PIXELS, _SCORE, _UNMATCHED, _AREA = 0.5, 1e-2, 0.02, 1e-2


def predictor(model: nn.Module) -> nn.Module:
    """A detector up to its boxes and masks or a segmentor up to its labels, in evaluation mode."""
    return task_of(model).predictions(model).eval()


def exportable(model: Any) -> nn.Module:
    """The part of a model that is a function of the image alone, in evaluation mode.

    A classifier and a segmentor up to their logits, a detector's backbone and neck; a backbone and
    a model of timm as they are. A UsageError says that logits depend on more than features.
    """
    if isinstance(model, DiffusionModel):
        raise UsageError(TAKES_NO_PHOTOGRAPHS)
    part = task_of(model).exportable(model) if hasattr(model, 'extract_feat') else model
    return part.eval()


def export_model(
    model: NamedModel,
    checkpoint: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    predictions: bool = False,
    size: tuple[int, int] | None = None,
    **options: Any,
) -> Iterator[Comparison]:
    """Writes a config's model (see `mmvttt.deploy.model_file.write_model`).

    Args:
        model: See `mmvttt.by_name.find_model`.
        checkpoint, out, options: See `write_model`.
        size: (height, width) of the pictures, by default those of the config's test. A file of one
            size takes them as the model's preprocessor pads them.
        predictions: Write boxes, labels and masks of a detector, or labels of a segmentor, for one
            image of one size (see `mmvttt.openmmlab.export.networks`). Not for a `.pt2`.

    Raises:
        UsageError: A wrong suffix, a part that needs a fixed size, a model whose predictions
            cannot be written.
        ModuleNotFoundError: A package for the format is not installed.
        CheckpointError, RuntimeError: See `write_model`.
    """
    if require_format(out) == '.pt2' and predictions:
        raise UsageError(
            'predictions are written as ONNX or for OpenVINO: give an out that ends in .onnx or '
            '.xml',
            'out',
        )
    network: Any = predictor(model.model) if predictions else exportable(model.model)
    picture, names = _pictures(model, size)
    if checkpoint is not None:
        names = {**names, **saved_dataset(read_content(checkpoint))}
    about: dict[str, Any] = {key: names[key] for key in ('classes', 'palette') if names.get(key)}
    size = picture
    if predictions:
        # As the preprocessor pads the picture.
        divisor = getattr(model.model.data_preprocessor, 'pad_size_divisor', 1)
        size = -(-picture[0] // divisor) * divisor, -(-picture[1] // divisor) * divisor
        network.picture, options['predictions'] = picture, _compare_predictions
    notes = {k: json.dumps(v, default=str) for k, v in (about | dict(picture_size=picture)).items()}
    yield from write_model(model, network, checkpoint, out, size, about=notes, **options)


def _pictures(
    named: NamedModel, size: tuple[int, int] | None
) -> tuple[tuple[int, int], dict[str, Any]]:
    """(height, width) of the pictures, and names and colours of the data set's classes.

    The size is `size`, else the size in the config's test pipeline, else the papers'.
    """
    sets = [d for d in datasets_of(named.config or {}, ('test',)) if not d.metric]
    tested = picture_size(sets[0].config.get('pipeline') or ()) if sets else None
    # mmsegmentation's 2048×512 bounds only the shorter side.
    if tested is not None and max(tested) > 2 * min(tested):
        tested = None
    return size or tested or named.size, sets[0].metainfo if sets else {}


@torch.no_grad()
def _compare_predictions(network: Any, run: Runs, image: Tensor) -> Comparison:
    """Compares a file with the toolbox's predictions for the same, padded image."""
    shape, outputs = tuple(image.shape), run(image)
    if not isinstance(network, Labels):
        sample = network.model.predict(image, samples_of(image, network.picture), rescale=False)[0]
        text, error, good = _match(as_outputs(sample.pred_instances), outputs)
        return Comparison(shape, error, text, good)
    labels, scores = network(image)
    error = float((labels != outputs[0]).float().mean())
    score = float((scores - outputs[1]).abs().max() / scores.max())
    text = f'{error:.1e} of the pixels have another label, scores differ by {score:.1e}'
    return Comparison(shape, error, text, error < _AREA and score < _SCORE)


def _match(expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[str, float, bool]:
    """Counterparts of detections: same label, next score, boxes less than half a pixel apart."""
    (dets, labels, *masks), (dets2, labels2, *masks2) = expected, outputs
    total = max(len(dets), len(dets2))
    if total == 0:
        return 'no boxes to compare: give images, photographs that have some', 0.0, True
    apart = (dets[:, None, :4] - dets2[:, :4]).abs().amax(-1)
    scores = (dets[:, None, 4] - dets2[:, 4]).abs()
    same = (labels[:, None] == labels2) & (apart < _PIXELS) & (scores < _SCORE)
    cost = torch.where(same, apart + scores, torch.inf)
    pairs = []
    while cost.numel() and cost.min() < torch.inf:
        i, j = divmod(int(cost.argmin()), cost.shape[1])
        pairs.append((i, j))
        cost[i], cost[:, j] = torch.inf, torch.inf
    left, right = torch.tensor(pairs, dtype=torch.long).view(-1, 2).T
    pixels, score = (float(x[left, right].max()) if pairs else 0.0 for x in (apart, scores))
    text = (
        f'{len(pairs)} of {total} boxes are the same within {_PIXELS} pixels, by {pixels:.1e} '
        f'pixels and {score:.1e} in score'
    )
    good = total - len(pairs) <= _UNMATCHED * total
    if masks and pairs:
        wrong = (masks[0][left] != masks2[0][right]).sum() / masks[0][left].sum().clamp(min=1)
        text += f'; {float(wrong):.1e} of the pixels of their masks differ'
        good = good and float(wrong) < _AREA
    return text, pixels, good
