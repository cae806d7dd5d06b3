"""Counts the objects that a training's pipeline drops before a model sees them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
from mmengine.registry import DATASETS

from .dataset_config import DatasetConfig
from .images import spread

# A random crop loses some.
_FEW = 0.05


def dropped_objects(data: DatasetConfig, most: int = 64) -> list[str]:
    """Says which transforms drop objects, with their number and size in pixels.

    At most `most` pictures of a data set of boxes pass through its pipeline; random crops and the
    like count as they happen. The states of the random numbers are left as they were.
    """
    dataset = DATASETS.build({**data.config, '_scope_': data.scope})
    states = random.getstate(), np.random.get_state()
    listed, sides = 0, dict[str, list[float]]()
    shapes: Counter[tuple[int, int]] = Counter()
    try:
        for index in spread(list(range(len(dataset))), most):
            sample: Any = dataset.get_data_info(index)
            listed += sum(not item.get('ignore_flag') for item in sample['instances'])
            for transform in dataset.pipeline.transforms:
                before, shape = _sides(sample), sample.get('img_shape')
                sample = transform(sample)
                if 'inputs' in (sample or {}):
                    break
                if shape and len(after := _sides(sample)) < len(before):
                    shapes[shape[1], shape[0]] += 1
                    lost = sorted(before)[: len(before) - len(after)]
                    sides.setdefault(type(transform).__name__, []).extend(lost)
                if sample is None:
                    break
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    width, height = shapes.most_common(1)[0][0] if shapes else (0, 0)
    return [
        f'{len(lost)} of {listed} objects are dropped by {name} at {width}x{height}: half of them '
        f'have {np.median(lost):.0f} pixels or less; train at a larger size, or cut the pictures '
        'into tiles'
        for name, lost in sides.items()
        if len(lost) > _FEW * listed
    ]


def _sides(sample: Any) -> list[float]:
    """The roots of the areas of the boxes that are learned, in pixels."""
    if sample is None or 'gt_bboxes' not in sample:
        return []
    boxes = np.asarray(getattr(sample['gt_bboxes'], 'tensor', sample['gt_bboxes']), float)
    boxes = boxes[~np.asarray(sample.get('gt_ignore_flags', np.zeros(len(boxes))), bool)]
    return np.sqrt((boxes[:, 2:4] - boxes[:, :2]).clip(0).prod(1)).tolist()
