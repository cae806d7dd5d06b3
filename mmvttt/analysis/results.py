"""Errors of a model: confusion matrix, precision over recall, COCO's types of errors.

From the predictions that `tools/test.py --out` writes, by the toolboxes' own counting.
"""

import importlib.util
import os
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.fileio import load
from mmengine.registry import DATASETS, METRICS, init_default_scope

from ..errors import UsageError
from ..registry import resolve_type
from .pictures import panels, save

# Numbers in the cells of a larger matrix would not be read.
_READABLE = 30


def analyze(
    config: Config,
    predictions: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    score_thr: float = 0.3,
) -> list[Path]:
    """Draws the confusion matrix, and for detectors the curves of COCO's error analysis.

    Rows are the truth, columns the prediction, in shares of a row. A detector's curves stand in
    `bbox/` and `segm/`, one for each class and one for all: precision over recall at an IoU of .75
    and .5, and what it would be without errors of place, of class and of background (Hoiem et al.).

    Args:
        config: The config that was tested.
        predictions: The .pkl file of `tools/test.py --out`.
        out_dir: Folder of the pictures, made if missing.
        score_thr: Boxes with a lower score are not in the confusion matrix.

    Returns:
        The pictures.

    Raises:
        UsageError: The config is of another toolbox, the file is of another test set, or that has
            no labels, or several of an image.
    """
    scope = config.get('default_scope')
    if scope not in _MATRICES:
        raise UsageError(
            f'default_scope is {scope!r}: results of {", ".join(_MATRICES)} are analysed'
        )
    init_default_scope(scope)
    dataset = DATASETS.build(config.test_dataloader.dataset)
    if not Path(predictions).is_file():
        raise UsageError(
            f'there is no file {os.fspath(predictions)!r}; tools/test.py --out writes it'
        )
    samples = load(predictions)
    if len(samples) != len(dataset):
        raise UsageError(
            f'{os.fspath(predictions)!r} has {len(samples)} predictions, the test set of the '
            f'config {len(dataset)} images'
        )
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    classes = list(dataset.metainfo['classes'])
    matrix = _MATRICES[scope](dataset, samples, len(classes), score_thr)
    if scope == 'mmdet':
        classes.append('background')
    pictures = [plot_confusion(matrix, classes, out_dir / 'confusion_matrix.png')]
    if scope == 'mmdet':
        pictures += _coco_errors(config, dataset, samples, out_dir)
    return pictures


def plot_confusion(matrix: np.ndarray, classes: Sequence[str], out: str | os.PathLike[str]) -> Path:
    """Draws counts `(truth, prediction)` as shares of each row that is not empty."""
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    side = 3 + 0.35 * len(classes)
    figure, (axes,) = panels(1, 1, (side + 1, side))
    drawn = axes.imshow(shares, vmin=0, vmax=1, cmap='Blues')
    figure.colorbar(drawn, ax=axes, label='share of the row')
    places = range(len(classes))
    axes.set(title='Confusion matrix', xlabel='prediction', ylabel='truth')
    axes.set_xticks(places, classes, rotation=90)
    axes.set_yticks(places, classes)
    if len(classes) <= _READABLE:
        for (row, column), share in np.ndenumerate(shares):
            color = 'white' if share > 0.5 else 'black'
            axes.text(
                column, row, f'{share:.0%}', ha='center', va='center', color=color, fontsize=7
            )
    return save(figure, out, dpi=120)


def _of_boxes(dataset: Any, samples: list, classes: int, score_thr: float) -> np.ndarray:
    truths = [dataset.get_data_info(index).get('instances', ()) for index in range(len(samples))]
    if not any(truths):
        raise _unlabelled()
    count = _script('mmdet', 'confusion_matrix').analyze_per_img_dets
    matrix = np.zeros((classes + 1, classes + 1))
    for truth, sample in zip(truths, samples, strict=True):
        count(matrix, truth, sample['pred_instances'], score_thr)
    return matrix


def _of_pixels(dataset: Any, samples: list, classes: int, score_thr: float) -> np.ndarray:
    if not all('gt_sem_seg' in sample for sample in samples):
        raise _unlabelled()
    matrix = np.zeros((classes, classes), np.int64)
    for sample in samples:
        truth, found = (
            np.asarray(sample[key]['data']).ravel().astype(np.int64)
            for key in ('gt_sem_seg', 'pred_sem_seg')
        )
        # 255 is not labelled.
        known = truth < classes
        pairs = classes * truth[known] + found[known]
        matrix += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    return matrix


def _of_images(dataset: Any, samples: list, classes: int, score_thr: float) -> np.ndarray:
    from mmpretrain.evaluation import ConfusionMatrix

    labels = [sample.get('gt_label') for sample in samples]
    if any(label is None for label in labels):
        raise _unlabelled()
    if any(len(label) != 1 for label in labels):
        raise UsageError(
            'the test set has images of several labels, or of none: a confusion matrix needs one '
            'label an image'
        )
    metric = ConfusionMatrix(num_classes=classes)
    return Evaluator(metric).offline_evaluate(samples)['confusion_matrix/result'].numpy()


def _unlabelled() -> UsageError:
    return UsageError(
        'the test set has no labels to compare predictions with; give one that has, or look at the '
        'predictions with tools/image_demo.py'
    )


_MATRICES: dict[str, Any] = {'mmdet': _of_boxes, 'mmseg': _of_pixels, 'mmpretrain': _of_images}


def _coco_errors(config: Config, dataset: Any, samples: list, out_dir: Path) -> list[Path]:
    """mmdet's picture of COCO's error analysis, of boxes and of masks where there are some."""
    from mmdet.evaluation import CocoMetric

    evaluators = config.test_evaluator
    evaluators = evaluators if isinstance(evaluators, list) else [evaluators]
    kinds = [resolve_type(e.get('type'), METRICS, 'mmdet') for e in evaluators]
    if CocoMetric not in kinds:
        return []
    metric = evaluators[kinds.index(CocoMetric)].copy()
    metric.update(format_only=True, outfile_prefix=str(out_dir / 'predictions'))
    evaluator = Evaluator(metric)
    evaluator.dataset_meta = dataset.metainfo
    evaluator.offline_evaluate(samples)
    script = _script('mmdet', 'coco_error_analysis')
    # It would start 48 processes, and asks for what only COCO's own files have.
    script.Pool = lambda processes: ThreadPool(1)
    script.COCO = _with_supercategories(script.COCO)
    pictures = []
    for kind in ('bbox', 'segm'):
        results = out_dir / f'predictions.{kind}.json'
        if results.is_file():
            script.analyze_results(str(results), metric['ann_file'], [kind], str(out_dir))
            pictures += sorted((out_dir / kind).glob('*.png'))
    return pictures


def _with_supercategories(base: Any) -> Any:
    class Coco(base):
        def createIndex(self) -> None:
            for category in self.dataset.get('categories', ()):
                category.setdefault('supercategory', category['name'])
            super().createIndex()

    return Coco


def _script(package: str, name: str) -> ModuleType:
    """One of the tools that a toolbox ships beside its package."""
    root = Path(importlib.util.find_spec(package).origin).parent
    path = root / '.mim' / 'tools' / 'analysis_tools' / f'{name}.py'
    if not path.is_file():
        raise UsageError(f'{package} is installed without its tools ({path})')
    spec = importlib.util.spec_from_file_location(f'_{package}_{name}', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
