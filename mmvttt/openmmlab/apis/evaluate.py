"""Testing from a config, for every toolbox, as tools/test.py does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import RUNNERS
from mmengine.runner import FlexibleRunner, Runner
from torch import nn

from mmvttt.checkpoints.read import read_content, saved_classes
from mmvttt.deploy.prepare import half_type, prepare
from mmvttt.errors import UsageError
from mmvttt.outputs import check_new_file

from ..config import load_config
from ..data.annotations import check_data
from ..data.dataset_config import DatasetConfig, datasets_of
from ..export.file_model import FileModel, open_for
from ..registry import resolve_type
from ..reliability.fit import require_weights
from ..tasks import Task, task_of
from ..unwrap import is_wrapped
from .train import build_runner, require_checkpoint

_NEEDED = ('model', 'test_dataloader', 'test_cfg', 'test_evaluator')


def evaluate(
    config: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    out: str | None = None,
    show_dir: str | None = None,
    tta: bool = False,
    amp: bool = False,
    cuda_graph: bool = False,
    file: str | os.PathLike[str] | None = None,
    **config_args: Any,
) -> dict[str, float]:
    """Evaluates a checkpoint on the config's test set.

    Args:
        config: Path of the config.
        checkpoint: The weights.
        out: A .pkl file for the predictions.
        show_dir: A folder for pictures of the predictions.
        tta: See `enable_tta`.
        amp: Run the backbone in mixed precision, see `prepare`.
        cuda_graph: Replay the backbone as a CUDA graph, see `prepare`. Images must have one size.
        file: An `.onnx` or `.xml` of `tools/export.py` that predicts in place of the model, see
            `FileModel`.
        config_args: See `load_config`.

    Returns:
        The metrics.

    Raises:
        UsageError: An option does not fit the config, there is no such checkpoint, or a path cannot
            be written.
        DataError: The test data is missing or makes no sense. Raised before anything is built.
        CheckpointError: The checkpoint cannot be read, or hardly matches the model.
    """
    if file is not None and (tta or cuda_graph):
        raise UsageError(
            'a file predicts as it was exported: leave tta and cuda_graph out', 'tta', 'cuda_graph'
        )
    cfg = load_config(config, needed=_NEEDED, **config_args)
    task = task_of(cfg)
    sets = datasets_of(cfg, ('test',))
    if tta and show_dir is not None and not task.draws_merged:
        raise UsageError(
            f'{task.toolbox} cannot draw merged predictions: leave tta or show_dir out',
            *('tta', 'show_dir'),
        )
    source = require_checkpoint(checkpoint)
    cfg.load_from, cfg.resume = source, False
    if resolve_type(cfg.get('runner_type'), RUNNERS, None) is FlexibleRunner:
        # FSDP's checkpoints are whole, and are evaluated as such.
        cfg.pop('runner_type')
    if show_dir is not None:
        show_predictions(cfg, show_dir, task)
    metrics = [] if out is None else [_dump(task, out)]
    if tta:
        enable_tta(cfg, task, sets)
    exported = None
    if file is not None:
        pipelines = [data.config['pipeline'] for data in sets if not data.metric]
        exported = open_for(file, pipelines, amp, saved_classes(read_content(source, mmap=True)))

    def other(model: Any) -> nn.Module:
        if exported is not None:
            return FileModel(model, exported, task)
        return prepare(model, 'backbone', half_type() if amp else None, cuda_graph)

    check_data(cfg, sets)
    runner, content = build_runner(cfg), read_content(source)
    require_weights(runner, content, source, whole=True)
    runner.register_hook(_TestOther(other))
    runner.test_evaluator.metrics += metrics
    return runner.test()


class _TestOther(Hook):
    """Replaces the runner's model before the test, once its weights are loaded."""

    def __init__(self, make: Callable[[Any], nn.Module]) -> None:
        self.make = make

    def before_test(self, runner: Runner) -> None:
        """Replaces the model inside of its wrappers."""
        parent, model = runner, runner.model
        while is_wrapped(model):
            parent, model = model, model.module
        setattr(parent, 'model' if parent is runner else 'module', self.make(model))


def enable_tta(cfg: Config, task: Task, sets: Sequence[DatasetConfig]) -> None:
    """Makes a config merge the predictions for versions of an image (test-time augmentation).

    Its `tta_pipeline` makes the versions and its `tta_model` merges them. For detectors only boxes
    are merged. `sets` are the test data sets and their metrics.
    """
    missing = [key for key in ('tta_model', 'tta_pipeline') if key not in cfg]
    if missing:
        raise UsageError(
            f"the config has no {' and '.join(missing)}, as mmengine's tta_model = "
            "dict(type='mmvttt.BoxTTAModel', …) and tta_pipeline = […, dict(type='TestTimeAug', "
            '…)]; add them, or leave tta out',
            'tta',
        )
    for data in sets:
        config: Any = data.config
        if not data.metric:
            config['pipeline'] = cfg.tta_pipeline
        elif merged := task.merge_metric(config):
            print_log(f'test-time augmentation merges {merged}', 'current')
    if cfg.get('data_preprocessor') is not None:
        cfg.model.setdefault('data_preprocessor', cfg.pop('data_preprocessor'))
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)


def show_predictions(cfg: Config, folder: str, task: Task) -> None:
    """Makes the toolbox's VisualizationHook draw every test image's prediction into a folder."""
    hook = (cfg.get('default_hooks') or {}).get('visualization')
    if hook is None:
        raise UsageError(
            'show_dir needs default_hooks.visualization, which the config lacks; add the '
            "toolbox's, e.g. dict(type='DetVisualizationHook')",
            'show_dir',
        )
    task.show(cfg, hook, folder)
    if cfg.get('visualizer') is not None:
        # Under the same name mmengine would return an earlier run's visualizer.
        cfg.visualizer.name = folder


def _dump(task: Task, out: str) -> Any:
    check_new_file(out)
    if not out.endswith(('.pkl', '.pickle')):
        raise UsageError(f'out={out!r} must end in .pkl or .pickle, as it is pickled', 'out')
    return task.dump(out)
