"""Mistakes of a test: confusion matrices of any toolbox, precision over recall of detectors."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from torch.utils.data import Dataset

from mmvttt.analysis.pictures import COLOURS, panels, save, styled
from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BACKGROUND = 'background'
# Curves from strict to lenient, by IoU and what is forgiven: the gap between two is the cost of a
# kind of mistake, as in COCO's analysis of errors.
_CURVES = {
    'IoU 0.75': (0.75, None),
    'IoU 0.5': (0.5, None),
    'badly placed (IoU 0.1)': (0.1, None),
    'and of another class': (0.1, 'class'),
    'and on the background': (0.1, 'background'),
}
_SCORE, _OVERLAP = 0.3, 0.5


class Mistakes(BaseMetric):
    """Counts which class is taken for which, and draws it when a test ends.

    Writes `confusion_matrix.csv` (counts: truth in rows, prediction in columns) and `.png` (shares
    of each row). Classifiers are counted by image and segmentors by labelled pixel. Boxes are
    counted by their truth: from the highest score down to 0.3, each takes the free truth that it
    overlaps most, by an IoU of 0.5 or more, whatever its class; what is left over is `background`.
    Of boxes `precision_recall.png` is drawn, too: precision over recall as it is, and with one kind
    of mistake after the other forgiven. What is missing then was not found.

    Args:
        folder: For the files.
        scope: 'mmdet', 'mmseg' or 'mmpretrain'.
        dataset: The set that is tested, whose boxes are the truth of a detector.

    Raises:
        UsageError: Another scope.
    """

    default_prefix = 'mistakes'

    def __init__(self, folder: str, scope: str | None, dataset: Dataset | None = None) -> None:
        super().__init__()
        count = dict(mmdet=self._boxes, mmseg=self._pixels, mmpretrain=self._images).get(str(scope))
        if count is None:
            raise UsageError(
                f'--mistakes: default_scope is {scope!r}; detectors, segmentors and classifiers '
                "('mmdet', 'mmseg', 'mmpretrain') have a confusion matrix"
            )
        self.folder, self.scope, self.dataset, self.count = Path(folder), scope, dataset, count
        self.truth: dict[Any, list[dict]] = {}

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Takes the predictions of a batch."""
        self.results += [self.count(sample) for sample in data_samples]

    def _images(self, sample: dict) -> tuple[int, int]:
        truth = self._known(sample, 'gt_label')
        if truth.numel() != 1:
            raise UsageError('--mistakes: an image of several labels has no confusion matrix')
        # Merged by --tta, a sample keeps the label of its first version.
        return int(truth), int(sample['pred_score'].argmax())

    def _pixels(self, sample: dict) -> tuple[np.ndarray, np.ndarray]:
        found = sample['pred_sem_seg']['data'].cpu().long().flatten()
        truth = self._known(sample, 'gt_sem_seg')['data'].cpu().long().flatten()
        classes = len(self.dataset_meta['classes'])
        kept = truth < classes
        return np.unique((truth[kept] * classes + found[kept]).numpy(), return_counts=True)

    def _boxes(self, sample: dict) -> tuple[dict, list[np.ndarray]]:
        if not self.truth:
            infos = map(self.dataset.get_data_info, range(len(self.dataset)))
            self.truth = {info['img_id']: info['instances'] for info in infos}
        known = self.truth[sample['img_id']]
        ignored = np.array([one['ignore_flag'] == 1 for one in known], bool)
        boxes = np.array([one['bbox'] for one in known], np.float32).reshape(-1, 4)
        labels = np.array([one['bbox_label'] for one in known], int)
        truth = dict(
            bboxes=boxes[~ignored],
            labels=labels[~ignored],
            bboxes_ignore=boxes[ignored],
            labels_ignore=labels[ignored],
        )
        found = {k: sample['pred_instances'][k].cpu() for k in ('bboxes', 'scores', 'labels')}
        scored = torch.cat((found['bboxes'], found['scores'][:, None]), 1).numpy()
        classes = range(len(self.dataset_meta['classes']))
        return truth, [scored[found['labels'].numpy() == label] for label in classes]

    @staticmethod
    def _known(sample: dict, key: str) -> Any:
        if key not in sample:
            raise UsageError(
                '--mistakes: the test data has no labels; leave it out, or have test_pipeline load '
                'them'
            )
        return sample[key]

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Writes the files; there is no figure."""
        # A classifier's data set need not name its classes.
        names = list(self.dataset_meta.get('classes') or range(np.max(results) + 1))
        matrix = np.zeros((len(names) + (self.scope == 'mmdet'),) * 2, int)
        if self.scope == 'mmdet':
            names.append(_BACKGROUND)
            for truth, found in results:
                _match(matrix, truth, found)
            _draw_precision(self.folder, *zip(*results, strict=True))
        elif self.scope == 'mmseg':
            for pairs, counts in results:
                matrix.flat[pairs] += counts
        else:
            np.add.at(matrix, tuple(np.array(results).T), 1)
        with replacing(self.folder / 'confusion_matrix.csv') as partial, open(partial, 'w') as file:
            table = csv.writer(file)
            table.writerow(['truth \\ predicted', *names])
            table.writerows([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))
        _draw_matrix(self.folder, matrix, names)
        return {}


def _match(matrix: np.ndarray, truth: dict, found: list[np.ndarray]) -> None:
    """Adds the boxes of an image to the confusion matrix, whose last class is the background."""
    from mmdet.evaluation import bbox_overlaps

    boxes = np.concatenate(found)
    labels = np.repeat(np.arange(len(found)), [len(one) for one in found])
    kept = np.flatnonzero(boxes[:, 4] >= _SCORE)
    order = kept[np.argsort(-boxes[kept, 4], kind='stable')]
    overlaps = bbox_overlaps(boxes[:, :4], truth['bboxes'])
    ignored = bbox_overlaps(boxes[:, :4], truth['bboxes_ignore'], mode='iof')
    free = np.ones(len(truth['labels']), bool)
    for index in order:
        candidates = np.where(free, overlaps[index], 0)
        best = int(candidates.argmax()) if len(candidates) else -1
        if best >= 0 and candidates[best] >= _OVERLAP:
            free[best] = False
            matrix[truth['labels'][best], labels[index]] += 1
        elif not (ignored[index] >= _OVERLAP).any():
            matrix[-1, labels[index]] += 1
    np.add.at(matrix[:, -1], truth['labels'][free], 1)


@styled
def _draw_matrix(folder: Path, matrix: np.ndarray, names: list[str]) -> None:
    side = min(max(5.0, 0.45 * len(names)), 40.0)
    figure, (panel,) = panels(1, 1, (side + 1.5, side))
    shares = 100 * matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    drawn = panel.imshow(shares, cmap=COLOURS, vmin=0, vmax=100)
    figure.colorbar(drawn, ax=panel, fraction=0.04).set_label('% of the truth')
    panel.set(xlabel='predicted', ylabel='truth')
    if len(names) <= 100:
        ticks = range(len(names))
        panel.set_xticks(ticks, names, rotation=60, ha='right', fontsize=9)
        panel.set_yticks(ticks, names, fontsize=9)
    if len(names) <= 30:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            share = shares[row, column]
            colour = 'black' if share > 60 else 'white'
            panel.text(column, row, f'{share:.0f}', color=colour, ha='center', va='center', size=8)
    save(figure, folder / 'confusion_matrix.png')


@styled
def _draw_precision(folder: Path, truths: tuple, found: tuple) -> None:
    """Draws precision over recall, the mean of all classes that are there."""
    figure, (panel,) = panels(1, 1, (6.0, 5.0))
    grid = np.linspace(0, 1, 101)
    below = np.zeros_like(grid)
    for name, (overlap, forgiven) in _CURVES.items():
        labels = range(len(found[0]))
        curves = [_precision(truths, found, label, overlap, grid, forgiven) for label in labels]
        mean = np.mean([c for c in curves if c is not None] or [np.zeros_like(grid)], axis=0)
        panel.fill_between(grid, below, mean, alpha=0.6, label=f'{name}: AP {mean.mean():.3f}')
        below = mean
    _axes_of_shares(panel)
    save(figure, folder / 'precision_recall.png')


def _precision(
    truths: tuple,
    found: tuple,
    label: int,
    overlap: float,
    grid: np.ndarray,
    forgiven: str | None = None,
) -> np.ndarray | None:
    """Precision of a class at each recall of the grid, the highest at it or beyond, as in COCO.

    Forgiven is what hits a box of another 'class', or every wrong box ('background').

    Not by mmdet's `eval_map`, which forks a pool of processes: it hangs where SIGTERM is handled.
    """
    from mmdet.evaluation.functional.mean_ap import tpfp_default

    parts, count = [np.zeros((3, 0))], 0
    for truth, boxes in zip(truths, found, strict=True):
        true = truth['bboxes'][truth['labels'] == label]
        ignored = truth['bboxes_ignore'][truth['labels_ignore'] == label]
        if forgiven == 'class':
            ignored = np.concatenate([ignored, truth['bboxes'][truth['labels'] != label]])
        count += len(true)
        right, wrong = tpfp_default(boxes[label], true, ignored, overlap)
        parts.append(np.vstack([boxes[label][:, 4], right, wrong]))
    if not count:
        return None
    scores, right, wrong = np.hstack(parts)
    order = np.argsort(-scores, kind='stable')
    right, wrong = right[order].cumsum(), wrong[order].cumsum() * (forgiven != 'background')
    precision = right / np.maximum(right + wrong, 1)
    highest = np.maximum.accumulate(precision[::-1])[::-1]
    return np.append(highest, 0.0)[np.searchsorted(right / count, grid, side='left')]


def _axes_of_shares(panel: Axes) -> None:
    panel.set(xlabel='recall', ylabel='precision', xlim=(0, 1), ylim=(0, 1.02))
    panel.grid(True)
    panel.legend(loc='lower left')
