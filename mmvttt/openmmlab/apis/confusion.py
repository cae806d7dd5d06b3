"""What a test got wrong, drawn by the toolboxes' own tools: which class is taken for which."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mmengine
import numpy as np
import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.registry import DATASETS
from torch import Tensor

from mmvttt.errors import UsageError

_RESULTS = 'predictions'


def keep_boxes(cfg: Config, folder: str) -> None:
    """Lets mmdet's CocoMetric write the boxes that `draw_mistakes` takes the curves from."""
    if cfg.default_scope == 'mmdet' and isinstance(cfg.test_evaluator, dict):
        cfg.test_evaluator.outfile_prefix = str(Path(folder, _RESULTS))


def draw_mistakes(cfg: Config, predictions: str, folder: str) -> None:
    """Draws the confusion matrix of a test; of COCO's boxes precision over recall, too.

    Args:
        cfg: The config of the test, with its data set.
        predictions: The pickle file that the test has written.
        folder: Where the pictures go.

    Raises:
        UsageError: The toolbox is installed without its tools.
    """
    import matplotlib as mpl

    mpl.use('Agg')
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    classes = dataset.metainfo.get('classes')
    found = mmengine.load(predictions)
    if cfg.default_scope == 'mmpretrain':
        from mmpretrain.evaluation import ConfusionMatrix

        matrix = Evaluator(ConfusionMatrix()).offline_evaluate(found, None)
        figure = ConfusionMatrix.plot(matrix['confusion_matrix/result'], classes=classes)
        figure.savefig(Path(folder, 'confusion_matrix.png'))
        return
    tool = _tool(cfg.default_scope, 'confusion_matrix.py')
    if cfg.default_scope == 'mmseg':
        matrix = _confusion(dataset, [one['pred_sem_seg']['data'] for one in found], len(classes))
        tool['plot_confusion_matrix'](matrix, classes, save_dir=folder, show=False)
        return
    matrix = tool['calculate_confusion_matrix'](dataset, found)
    names = (*classes, 'background')
    tool['plot_confusion_matrix'](matrix, names, save_dir=folder, show=False)
    boxes = Path(folder, f'{_RESULTS}.bbox.json')
    if boxes.is_file():
        curves = _tool('mmdet', 'coco_error_analysis.py')
        curves['analyze_results'](str(boxes), dataset.ann_file, ['bbox'], out_dir=folder)


def _confusion(dataset: Any, maps: list[Tensor], count: int) -> np.ndarray:
    """Pixels by label and prediction; mmsegmentation's own overflows 8 bits."""
    matrix = torch.zeros(count * count, dtype=torch.long)
    for index, predicted in enumerate(maps):
        label = dataset[index]['data_samples'].gt_sem_seg.data.long().flatten()
        kept = label < count
        pairs = label[kept] * count + predicted.cpu().long().flatten()[kept]
        matrix += torch.bincount(pairs, minlength=count * count)
    return matrix.view(count, count).numpy()


def _tool(package: str, name: str) -> dict[str, Any]:
    """The functions of a tool that the toolbox ships."""
    spec = find_spec(package)
    root = Path((spec and spec.origin) or '').parent
    places = (root / '.mim' / 'tools', root.parent / 'tools')
    path = next((p / 'analysis_tools' / name for p in places if p.is_dir()), None)
    if path is None or not path.is_file():
        raise UsageError(
            f'--mistakes: {package} is installed without tools/analysis_tools/{name}; install its '
            'wheel, or leave the option out'
        )
    return runpy.run_path(str(path))
