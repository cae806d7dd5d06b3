"""Mistakes of a test: confusion matrices of any toolbox, precision over recall of detectors."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.evaluator import BaseMetric
from torch.utils.data import Dataset

from mmvttt.analysis.pictures import COLOURS, cut_middle, panels, save, styled
from mmvttt.checkpoints.atomic_write import replacing
from mmvttt.errors import UsageError

_BACKGROUND = 'background'
# More classes than these have no names, or no counts, in the picture.
_NAMED, _COUNTED = 100, 30
# Curves from strict to lenient, by IoU and what is forgiven: the gap between two is the cost of a
# kind of mistake, as in COCO's analysis of errors.
_OVERLAPS = (0.75, 0.5, 0.1)
_CURVES = (
    'IoU 0.75',
    'IoU 0.5',
    'badly placed (IoU 0.1)',
    'and of another class',
    'and on the background',
)
_SCORE, _OVERLAP = 0.3, 0.5
_TITLES = {
    'mmdet': f'Boxes of score {_SCORE} or more, IoU {_OVERLAP} or more',
    'mmseg': 'Labelled pixels',
    'mmpretrain': 'Images',
}


class Mistakes(BaseMetric):
    """Counts which class is taken for which, and draws it when a test ends.

    Writes `confusion_matrix.csv` (counts: truth in rows, prediction in columns) and `.png` (counts,
    coloured by their share of the row; classes that are not in the data have no row). Classifiers
    are counted by image and segmentors by labelled pixel. Boxes are counted by their truth: from
    the highest score down to 0.3, each takes the free truth that it overlaps most, by an IoU of 0.5
    or more, whatever its class; what is left over is `background`. `precision_recall.png` of boxes
    is by pycocotools, so that its APs are the log's: as it is, and with one kind of mistake after
    the other forgiven. `dataset` has the true boxes of a detector.
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
        self.truth: dict[Any, np.ndarray] = {}

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Takes the predictions of a batch."""
        self.results += [self.count(sample) for sample in data_samples]

    def _images(self, sample: dict) -> tuple[int, int]:
        truth = self._label(sample, 'gt_label')
        if truth.numel() != 1:
            raise UsageError('--mistakes: an image of several labels has no confusion matrix')
        # Merged by --tta, a sample keeps the label of its first version.
        return int(truth), int(sample['pred_score'].argmax())

    def _pixels(self, sample: dict) -> tuple[np.ndarray, np.ndarray]:
        predicted = sample['pred_sem_seg']['data'].cpu().long().flatten()
        truth = self._label(sample, 'gt_sem_seg')['data'].cpu().long().flatten()
        classes = len(self.dataset_meta['classes'])
        labelled = truth < classes
        pairs = truth[labelled] * classes + predicted[labelled]
        return np.unique(pairs.numpy(), return_counts=True)

    def _boxes(self, sample: dict) -> tuple[np.ndarray, np.ndarray]:
        """True boxes `(n, 6)` and detected ones `(m, 6)` of an image.

        x, y, width, height, class, and whether it is ignored, or its score.
        """
        if not self.truth:
            for info in map(self.dataset.get_data_info, range(len(self.dataset))):
                rows = [(*x['bbox'], x['bbox_label'], x['ignore_flag']) for x in info['instances']]
                self.truth[info['img_id']] = _as_sizes(np.array(rows, float).reshape(-1, 6))
        objects = sample['pred_instances']
        rows = [objects[key].cpu().numpy() for key in ('bboxes', 'labels', 'scores')]
        return self.truth[sample['img_id']], _as_sizes(np.column_stack(rows).astype(float))

    @staticmethod
    def _label(sample: dict, key: str) -> Any:
        if key not in sample:
            raise UsageError(
                '--mistakes: the test data has no labels; leave it out, or have test_pipeline load '
                'them'
            )
        return sample[key]

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Writes the files; there is no figure."""
        # A classifier's data set need not name its classes.
        names = list(self.dataset_meta.get('classes') or map(str, range(np.max(results) + 1)))
        matrix = np.zeros((len(names) + (self.scope == 'mmdet'),) * 2, int)
        if self.scope == 'mmdet':
            names.append(_BACKGROUND)
            for truth, boxes in results:
                _match(matrix, truth, boxes)
            _draw_precision(self.folder, results, len(names) - 1)
        elif self.scope == 'mmseg':
            for pairs, counts in results:
                matrix.flat[pairs] += counts
        else:
            np.add.at(matrix, tuple(np.array(results).T), 1)
        with replacing(self.folder / 'confusion_matrix.csv') as partial, open(partial, 'w') as file:
            table = csv.writer(file)
            table.writerow(['truth \\ predicted', *names])
            table.writerows([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))
        _draw_matrix(self.folder, matrix, names, _TITLES[str(self.scope)])
        return {}


def _as_sizes(boxes: np.ndarray) -> np.ndarray:
    """Rows of corners, and more, as rows of a corner and a size."""
    boxes[:, 2:4] -= boxes[:, :2]
    return boxes


def _match(matrix: np.ndarray, truth: np.ndarray, boxes: np.ndarray) -> None:
    """Adds the boxes of an image to the confusion matrix, whose last class is the background."""
    from pycocotools.mask import iou

    boxes = boxes[boxes[:, 5] >= _SCORE]
    boxes = boxes[np.argsort(-boxes[:, 5], kind='stable')]
    labels, classes = boxes[:, 4].astype(int), truth[:, 4].astype(int)
    ignored = truth[:, 5] > 0
    overlaps = np.zeros((len(boxes), len(truth)))
    if overlaps.size:
        # For a region to ignore, the share of the box inside it.
        overlaps = iou(boxes[:, :4], truth[:, :4], ignored.tolist())
    free = ~ignored
    for label, row in zip(labels, overlaps, strict=True):
        best = int(np.where(free, row, 0).argmax()) if len(row) else -1
        if best >= 0 and free[best] and row[best] >= _OVERLAP:
            free[best] = False
            matrix[classes[best], label] += 1
        elif not (row[ignored] >= _OVERLAP).any():
            matrix[-1, label] += 1
    np.add.at(matrix[:, -1], classes[free], 1)


@styled
def _draw_matrix(folder: Path, matrix: np.ndarray, names: list[str], title: str) -> None:
    present = np.flatnonzero(matrix.any(1))
    background = names[-1] == _BACKGROUND
    counts = matrix[present]
    rows, columns = [cut_middle(names[i], 24) for i in present], [cut_middle(n, 24) for n in names]
    shares = 100 * counts / counts.sum(1, keepdims=True)
    if background:
        columns[-1] = 'not found'
        if present[-1] == len(names) - 1:
            # Boxes on the background are no share of anything.
            rows[-1], shares[-1] = 'nothing there', np.nan
    wide, high = (min(max(5.0, 0.5 * len(x)), 40.0) for x in (columns, rows))
    figure, (panel,) = panels(1, 1, (wide + 2.5, high + 1), title)
    drawn = panel.imshow(shares, cmap=COLOURS, vmin=0, vmax=100, aspect='auto')
    figure.colorbar(drawn, ax=panel, fraction=0.04).set_label('% of the row')
    panel.set(xlabel='predicted', ylabel='truth')
    if len(names) <= _NAMED:
        panel.set_xticks(range(len(columns)), columns, rotation=60, ha='right', fontsize=9)
        panel.set_yticks(range(len(rows)), rows, fontsize=9)
    if len(names) <= _COUNTED:
        for row, column in zip(*np.nonzero(counts), strict=True):
            dark = shares[row, column] <= 60
            panel.text(column, row, f'{counts[row, column]}', ha='center', va='center', size=8,
                       color='white' if dark else 'black')  # fmt: skip
    save(figure, folder / 'confusion_matrix.png')


@styled
def _draw_precision(folder: Path, results: Sequence[tuple], classes: int) -> None:
    """Draws precision over recall, the mean of all classes that are there."""
    figure, (panel,) = panels(1, 1, (9.0, 5.0), 'Precision over recall, mean of the classes')
    grid = np.linspace(0, 1, 101)
    below = np.zeros_like(grid)
    for name, curve in precision_curves(results, classes).items():
        panel.fill_between(grid, below, curve, alpha=0.6, label=f'{name}: AP {curve.mean():.3f}')
        below = curve
    panel.set(xlabel='recall', ylabel='precision', xlim=(0, 1), ylim=(0, 1.02))
    panel.grid(True)
    figure.legend(loc='outside right center')
    save(figure, folder / 'precision_recall.png')


def precision_curves(results: Sequence[tuple], classes: int) -> dict[str, np.ndarray]:
    """COCO's precision at 101 recalls from 0 to 1, by what is forgiven: the mean over classes.

    `results` has the boxes of each image, see `Mistakes._boxes`.
    """
    strict = _coco_precision(results, classes)
    # Boxes of other classes become regions to ignore: who hits them is not wrong.
    lenient = []
    for label in range(classes):
        alike = []
        for truth, boxes in results:
            other = truth.copy()
            other[:, 5] = np.maximum(truth[:, 5], truth[:, 4] != label)
            other[:, 4] = label
            alike.append((other, boxes[boxes[:, 4] == label]))
        lenient.append(_coco_precision(alike, classes)[-1, :, label])
    curves = [*strict, np.stack(lenient, -1)]
    curves.append((curves[-1] > 0).astype(float) - (curves[-1] < 0))
    means = [[row[row > -1].mean() if (row > -1).any() else 0.0 for row in c] for c in curves]
    return {name: np.array(mean) for name, mean in zip(_CURVES, means, strict=True)}


def _coco_precision(results: Sequence[tuple], classes: int) -> np.ndarray:
    """Precision `(overlaps, recalls, classes)`; −1 for a class without boxes."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    categories = [dict(id=label) for label in range(classes)]
    images = [dict(id=i) for i in range(len(results))]
    truths, detections = COCO(), COCO()
    for coco, part in ((truths, 0), (detections, 1)):
        rows = [(image, row) for image, pair in enumerate(results) for row in pair[part]]
        coco.dataset = dict(
            images=images,
            categories=categories,
            # COCOeval takes the id 0 for "not matched".
            annotations=[
                dict(id=i, image_id=image, bbox=row[:4], area=row[2] * row[3],
                     category_id=int(row[4]), iscrowd=int(row[5] > 0) if part == 0 else 0,
                     score=row[5])
                for i, (image, row) in enumerate(rows, 1)
            ],
        )  # fmt: skip
        with redirect_stdout(StringIO()):
            coco.createIndex()
    evaluation = COCOeval(truths, detections, 'bbox')
    evaluation.params.iouThrs = np.array(_OVERLAPS)
    evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, np.inf]], ['all']
    evaluation.params.maxDets = [1000]
    with redirect_stdout(StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation.eval['precision'][..., 0, 0]
