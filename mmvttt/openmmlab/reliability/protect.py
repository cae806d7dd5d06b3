"""Adds the protections of a training to its config and its runner."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmengine import hooks
from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.logging import print_log
from mmengine.runner import Runner

from mmvttt.checkpoints.read import read_content
from mmvttt.errors import CheckpointError, DataError, ResumeError, first_line

from ..data.annotations import check_data
from ..data.dataset_config import datasets_of
from ..registry import hook_class, type_name
from .anomaly_hook import AnomalyHook
from .checkpoint_hook import CheckpointHook
from .exact_resume import make_exact
from .fit import CompareOnLoad, WarnAtStart, require_weights
from .resume import choose_checkpoint
from .run_lock import RunLock, folders_of
from .settings import require_same_training
from .signals import end_workers
from .weights import FitHeads, load_whole_model, locate_checkpoints

# Errors of mmengine at entries of a checkpoint that are not a training's.
_ODD_ENTRIES = ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError


@dataclass(frozen=True)
class Start:
    """The state that a training resumes from, and the lock on its work directory."""

    checkpoint: str | None
    lock: RunLock


def protect_config(cfg: Config, *, plain: bool = False) -> Start:
    """Checks a training before anything is built, and adds the protections to its config.

    If it raises, no file of the work directory has changed, but for the lock's.

    Args:
        cfg: The config of a training, with its `work_dir`. It is changed in place.
        plain: Only check, without `add_protection`.

    Returns:
        The argument of `protect_runner`, which releases the lock.

    Raises:
        UsageError: The work directory cannot be written, another training runs in it, or the nodes
            do not run the same training.
        DataError: The config's data is missing or makes no sense.
        CheckpointError: Weights to start from are missing, or cannot be downloaded.
        ResumeError: The config has `resume`, but no good checkpoint exists.
    """
    require_same_training(cfg)
    folders = folders_of(cfg)
    lock = RunLock(*folders)
    try:
        checkpoint = choose_checkpoint(cfg, folders)
        check_data(cfg, datasets_of(cfg), ('train', 'val'))
        load_whole_model(cfg)
        locate_checkpoints(cfg)
    except Exception:
        lock.undo()
        raise
    if not plain:
        add_protection(cfg)
    config = Path(cfg.work_dir, os.path.basename(cfg.filename or ''))
    if is_main_process() and config.is_symlink():
        # mmengine writes the config here, and would overwrite a link's target.
        config.unlink()
    return Start(checkpoint, lock)


def add_protection(cfg: Config) -> None:
    """Adds `CheckpointHook`, `make_exact` and `AnomalyHook` to a training's config.

    The config's own hooks stay. A warning names what is lost by one.
    """
    scope = cfg.get('default_scope')
    cfg.default_hooks = cfg.get('default_hooks') or {}
    cfg.default_hooks.setdefault('checkpoint', dict(type='CheckpointHook', interval=1))
    # Not what `setdefault` returns, which is a copy.
    hook = cfg.default_hooks.checkpoint
    kind = None if hook is None else hook_class(hook, scope)
    if kind is hooks.CheckpointHook and isinstance(hook, dict):
        hook['type'] = 'mmvttt.CheckpointHook'
    elif kind is not None and not issubclass(kind, CheckpointHook):
        print_log(
            f'default_hooks.checkpoint is a {type_name(kind)}, which is kept: SIGTERM and Ctrl-C '
            'leave no checkpoint; derive it from mmvttt.openmmlab.reliability.CheckpointHook',
            'current',
            logging.WARNING,
        )
    custom = list(cfg.get('custom_hooks') or [])
    if AnomalyHook not in [hook_class(h, scope) for h in custom]:
        cfg.custom_hooks = [*custom, dict(type='mmvttt.AnomalyHook')]
    if reason := make_exact(cfg):
        print_log(f'a resume of this training will not be exact: {reason}', 'current')


@contextmanager
def protect_runner(runner: Runner, start: Start) -> Iterator[None]:
    """Wraps `runner.train()`: checks the checkpoint, ends data workers, releases the lock.

    `start` is the result of `protect_config`.

    Raises:
        CheckpointError: `load_from` cannot be read, or hardly matches the model.
        ResumeError: At the start of the training: the checkpoint belongs to another one.
    """
    checkpoint = start.checkpoint
    try:
        if runner._resume:
            runner._load_from = checkpoint
            runner._resume = checkpoint is not None
            none = f'no checkpoint in {runner.work_dir} yet'
            runner.logger.info(f'resuming from {checkpoint}' if checkpoint else none)
        runner.register_hook(WarnAtStart())
        if checkpoint is not None:
            runner.register_hook(CompareOnLoad(checkpoint), priority='HIGHEST')
            runner.resume = partial(_resume, runner.resume)
        elif runner._load_from:
            require_weights(runner, read_content(runner._load_from), runner._load_from)
            runner.register_hook(FitHeads())
        yield
    except DataError:
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook):
                hook.save_before_error(runner)
        raise
    finally:
        end_workers(runner)
        start.lock.release()


def _resume(resume: Callable[..., None], path: str, *args: Any, **options: Any) -> None:
    """`Runner.resume`, which stumbles over entries of a checkpoint that are not a training's."""
    try:
        resume(path, *args, **options)
    except CheckpointError:
        raise
    except _ODD_ENTRIES as error:
        raise ResumeError(
            f'{path!r} cannot be resumed from ({type(error).__name__}: {first_line(error)}): give '
            'a file that a training wrote'
        ) from error
