"""Training and testing from a config, for every toolbox: what tools/train.py and test.py call."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from mmengine import optim
from mmengine.config import Config, ConfigDict
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.registry import OPTIM_WRAPPERS, RUNNERS
from mmengine.runner import FlexibleRunner, Runner

from mmvttt.checkpoints.read import require_same_classes
from mmvttt.checkpoints.sources import without_password
from mmvttt.deploy.cuda_graph import replay_cuda_graph
from mmvttt.deploy.runtime import open_exported
from mmvttt.errors import UsageError

from ..config import load_config
from ..engine.amp import AmpOptimWrapper, autocast_backbone, backbone_for, warn_of_emulation
from ..engine.hooks.compile import CompileHook
from ..registry import hook_class, resolve_type, type_name
from ..reliability import protect_config, protect_runner
from ..reliability.data.paths import check_data
from ..reliability.weights import require_weights
from .file_inference import run_file
from .screen import QuietRunner, layer_decay_advice, summary

_WRAPPERS = (optim.OptimWrapper, optim.AmpOptimWrapper, AmpOptimWrapper)


def build_runner(cfg: Config) -> Runner:
    """The runner of a config: mmengine's, or the one that `runner_type` names."""
    return QuietRunner.from_cfg(cfg) if 'runner_type' not in cfg else RUNNERS.build(cfg)


def enable_amp(cfg: Config) -> None:
    """Switches to mixed precision: bf16 where the device has it, else fp16 with loss scaling.

    A `dtype` that the config gives stays. bf16 is the type to use with test-time training: in fp16
    the inner gradients underflow more easily.
    """
    wrapper = cfg.optim_wrapper
    kind = wrapper.get('type', 'OptimWrapper')
    if resolve_type(kind, OPTIM_WRAPPERS, cfg.get('default_scope')) not in _WRAPPERS:
        raise UsageError(
            f"--amp needs optim_wrapper.type 'OptimWrapper' or 'AmpOptimWrapper', the config has "
            f'{type_name(kind)!r}; set the precision in the config'
        )
    wrapper.type = 'mmvttt.AmpOptimWrapper'
    warn_of_emulation()


def enable_auto_scale_lr(cfg: Config) -> None:
    """Scales the learning rate by the real batch over the config's `base_batch_size`."""
    if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
        raise UsageError(
            '--auto-scale-lr needs to know the batch that the learning rate is meant for; add '
            'auto_scale_lr = dict(base_batch_size=16) to the config'
        )
    cfg.auto_scale_lr.enable = True


def enable_compile(cfg: Config) -> None:
    """Compiles the blocks of backbone and adapter with torch.compile, by a `CompileHook`.

    One that the config has already stays.
    """
    custom = list(cfg.get('custom_hooks') or [])
    if CompileHook not in [hook_class(hook, cfg.get('default_scope')) for hook in custom]:
        cfg.custom_hooks = [*custom, dict(type='mmvttt.CompileHook')]


def enable_tta(cfg: Config) -> None:
    """Merges the predictions for versions of an image, as the config's own two entries say.

    `tta_pipeline` makes the versions and `tta_model` merges them: of detectors the boxes alone.

    Raises:
        UsageError: The config lacks one of them, or measures masks of a detector.
    """
    missing = [key for key in ('tta_model', 'tta_pipeline') if key not in cfg]
    if missing:
        raise UsageError(
            f"--tta: the config has no {' and '.join(missing)}, as mmengine's tta_model = "
            "dict(type='mmvttt.BoxTTAModel', …) and tta_pipeline = […, dict(type='TestTimeAug', "
            '…)]; add them, or leave --tta out'
        )
    evaluator = cfg.get('test_evaluator') or {}
    measured = evaluator.get('metric') if isinstance(evaluator, dict) else None
    if cfg.get('default_scope') == 'mmdet' and 'segm' in (measured or ()):
        raise UsageError(
            '--tta merges boxes and no masks; measure boxes alone, with --cfg-options '
            'test_evaluator.metric=bbox'
        )
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
    if cfg.get('data_preprocessor') is not None:
        cfg.model.setdefault('data_preprocessor', cfg.pop('data_preprocessor'))
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)


def train(
    config: str | os.PathLike[str],
    *,
    resume: str | None = None,
    amp: bool = False,
    auto_scale_lr: bool = False,
    seed: int | None = None,
    deterministic: bool = False,
    plain: bool = False,
    compile: bool = False,
    **config_args: Any,
) -> Runner:
    """Trains what a config describes.

    Args:
        config: Path of a config; its `default_scope` decides the toolbox.
        resume: 'auto' (the latest checkpoint of the work directory; if there is none, the config's
            `load_from`), or a path.
        amp: See `enable_amp`.
        auto_scale_lr: See `enable_auto_scale_lr`.
        seed: For all random numbers; default: the config's, or a new one.
        deterministic: Choose deterministic algorithms.
        plain: Leave the config as it is; see `mmvttt.openmmlab.reliability.add_protection`.
        compile: See `enable_compile`.
        config_args: See `load_config`.

    Returns:
        The runner, after training.

    Raises:
        UsageError: An option does not fit the config; the work directory cannot be written; the
            nodes do not run the same training, or another training runs in the directory.
        DataError: Before anything is built, where the config's data is missing, or cannot be what
            is meant.
        CheckpointError: `load_from` cannot be read, or has next to nothing for the model; or (as
            ResumeError) there is nothing good to resume from.
    """
    cfg = load_config(config, **config_args)
    _require(cfg, 'model', 'train_dataloader', 'train_cfg', 'optim_wrapper')
    _fetch_private(cfg)
    if amp:
        enable_amp(cfg)
    if auto_scale_lr:
        enable_auto_scale_lr(cfg)
    if compile:
        enable_compile(cfg)
    if seed is not None:
        cfg.merge_from_dict({'randomness.seed': seed})
    if deterministic:
        cfg.merge_from_dict({'randomness.deterministic': True})
    weights = None
    if resume is not None:
        weights, cfg.resume = cfg.get('load_from'), True
        cfg.load_from = None if resume == 'auto' else _existing(resume)
    checkpoint = protect_config(cfg, plain=plain)
    if checkpoint is None and weights is not None:
        # Nothing to resume: the training begins where it would without --resume.
        cfg.resume, cfg.load_from = False, _existing(weights)
    runner = build_runner(cfg)
    with protect_runner(runner, checkpoint):
        print_log(f'\n{summary(runner, cfg)}', 'current')
        if advice := layer_decay_advice(runner, cfg):
            print_log(advice, 'current', logging.WARNING)
        runner.train()
    return runner


def evaluate(
    config: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    out: str | None = None,
    show_dir: str | None = None,
    mistakes: str | None = None,
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
        mistakes: A folder for the confusion matrix, see `mmvttt.openmmlab.analysis.mistakes`.
        tta: See `enable_tta`.
        amp: Run the backbone in mixed precision, see `autocast_backbone`.
        cuda_graph: Replay the backbone as a CUDA graph, see `mmvttt.deploy.cuda_graph`.
        file: An `.onnx` or `.xml` of `tools/export.py` that predicts in place of the model, see
            `run_file`; with `amp` OpenVINO computes in bf16.
        config_args: See `load_config`.

    Returns:
        The metrics.

    Raises:
        UsageError: An option does not fit the config, or there is no such checkpoint.
        DataError: Before anything is built, where the test data is missing, or cannot be what is
            meant.
        CheckpointError: The checkpoint cannot be read, or has next to nothing for the model.
    """
    if cuda_graph and not torch.cuda.is_available():
        raise UsageError('--cuda-graph: torch sees no CUDA GPU here; leave it out')
    if file is not None and (tta or cuda_graph):
        raise UsageError('a file predicts as it was exported: leave out --tta and --cuda-graph')
    cfg = load_config(config, **config_args)
    _require(cfg, 'model', 'test_dataloader', 'test_cfg', 'test_evaluator')
    _fetch_private(cfg)
    cfg.load_from = _existing(checkpoint)
    cfg.resume = False
    runner_type = resolve_type(cfg.get('runner_type'), RUNNERS, cfg.get('default_scope'))
    if runner_type is FlexibleRunner:
        # FSDP's checkpoints are whole, and are evaluated as such.
        cfg.pop('runner_type')
    if show_dir is not None:
        if tta and cfg.default_scope == 'mmpretrain':
            raise UsageError(
                '--show-dir and --tta: mmpretrain draws on what a classifier gets, and with --tta '
                'that is several images; give one of the two'
            )
        show_predictions(cfg, show_dir)
    if tta:
        enable_tta(cfg)
    check_data(cfg, ('test',))
    runner = build_runner(cfg)
    require_weights(runner, cfg.load_from, whole=True)
    metainfo = getattr(runner.test_dataloader.dataset, 'metainfo', {})
    require_same_classes(cfg.load_from, metainfo.get('classes'))
    if file is not None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        exported = open_exported(file, 'bfloat16' if amp else 'float32')
        dataset = runner.test_dataloader.dataset
        for part in getattr(dataset, 'datasets', [dataset]):
            run_file(model, part.pipeline.transforms, exported)
    elif amp:
        autocast_backbone(runner.model)
    if cuda_graph:
        replay_cuda_graph(backbone_for(runner.model, '--cuda-graph'))
    if out is not None:
        runner.test_evaluator.metrics.append(_dump(cfg, out))
    if mistakes is not None:
        from ..analysis.mistakes import Mistakes

        metric = Mistakes(mistakes, cfg.get('default_scope'), runner.test_dataloader.dataset)
        metric.dataset_meta = runner.test_evaluator.dataset_meta
        runner.test_evaluator.metrics.append(metric)
    return runner.test()


def show_predictions(cfg: Config, folder: str) -> None:
    """Makes the toolbox's VisualizationHook draw every test image's prediction into a folder.

    Raises:
        UsageError: The config has no hook that draws.
    """
    hook = cfg.get('default_hooks', {}).get('visualization')
    if hook is None:
        raise UsageError(
            '--show-dir needs default_hooks.visualization, which the config lacks; add the '
            "toolbox's, e.g. dict(type='DetVisualizationHook')"
        )
    if cfg.default_scope == 'mmpretrain':
        hook.update(enable=True, out_dir=folder, interval=1)
    elif cfg.default_scope == 'mmseg':
        hook.update(draw=True, interval=1)
        cfg.visualizer.update(save_dir=folder)
    else:
        # mmdet joins the folder to work_dir/<timestamp>, unless it is absolute.
        hook.update(draw=True, test_out_dir=os.path.abspath(folder))


def _dump(cfg: Config, out: str) -> Any:
    if not out.endswith(('.pkl', '.pickle')):
        raise UsageError(f'--out {out!r} must end in .pkl or .pickle: predictions are pickled')
    if cfg.default_scope == 'mmdet':
        from mmdet.evaluation import DumpDetResults

        return DumpDetResults(out_file_path=out)
    from mmengine.evaluator import DumpResults

    return DumpResults(out_file_path=out)


def _require(cfg: Config, *keys: str) -> None:
    missing = [key for key in keys if cfg.get(key) is None]
    if missing:
        raise UsageError(
            f"the config '{cfg.filename}' has no {', '.join(missing)}; it may be a part for the "
            '_base_ of another one'
        )


def _existing(checkpoint: str | os.PathLike[str]) -> str:
    source = os.path.expanduser(os.fspath(checkpoint))
    if '://' not in source and not os.path.isfile(source):
        raise UsageError(
            f'there is no checkpoint {source!r} (looked for {os.path.abspath(source)})'
        )
    return without_password(source)


def _fetch_private(cfg: Any) -> None:
    """Downloads the checkpoints of a config whose URLs have a password, and names the files.

    A config is written into logs, checkpoints and work directories.
    """
    for key, value in cfg.items() if isinstance(cfg, dict | Config) else enumerate(cfg):
        if isinstance(value, dict | list):
            _fetch_private(value)
        elif key in ('checkpoint', 'load_from') and isinstance(value, str):
            cfg[key] = without_password(value)
