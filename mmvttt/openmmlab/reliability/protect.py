"""Adds the protections of a training to its config and its runner."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmengine import hooks
from mmengine.config import Config, ConfigDict
from mmengine.dist import is_main_process
from mmengine.logging import print_log
from mmengine.runner import Runner

from mmvttt.checkpoints.read import read_content
from mmvttt.errors import CheckpointError, DataError, ResumeError, UsageError, first_line

from ..registry import hook_class, type_name
from .anomaly_hook import AnomalyHook
from .checkpoint_hook import CheckpointHook
from .data.annotations import check_data
from .data.dataset_config import datasets_of
from .exact_resume import make_exact, unsaved_state
from .fit import CompareOnLoad, ComparePreparation, require_weights
from .resume import choose_checkpoint, states
from .run_lock import RunLock, require_free
from .settings import require_same_training
from .signals import end_workers
from .topology_hook import TopologyHook

# Errors of mmengine at entries of a checkpoint that are not a training's.
_ODD_ENTRIES = ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError
# Names of regular checkpoints.
_REGULAR = re.compile(r'(epoch|iter)_\d+\.pth')


@dataclass(frozen=True)
class Start:
    """State of a work directory before a training: what it resumes from, and its checkpoints.

    `files` has their sizes and times by name.
    """

    checkpoint: str | None
    files: Mapping[str, tuple[int, int]]


def protect_config(cfg: Config, *, plain: bool = False) -> Start:
    """Checks a training before anything is built, and adds the protections to its config.

    If it raises, no file of the work directory has changed.

    Args:
        cfg: The config of a training, with its `work_dir`; is changed.
        plain: Only check, without `add_protection`.

    Returns:
        The state of the work directory, for `protect_runner`.

    Raises:
        UsageError: The work directory cannot be written, another training runs in it, or the nodes
            do not run the same training.
        DataError: The config's data is missing or makes no sense.
        ResumeError: The config has `resume`, but there is no good checkpoint.
    """
    sets = datasets_of(cfg)
    require_same_training(cfg, [data for data in sets if data.split != 'test'])
    require_free(cfg.work_dir)
    files, checkpoint = states(cfg.work_dir), choose_checkpoint(cfg)
    check_data(cfg, ('train', 'val'), sets)
    former = [name for name in files if _REGULAR.fullmatch(name)]
    if former and not cfg.get('resume'):
        print_log(
            f'{cfg.work_dir} has checkpoints of an earlier training ({", ".join(former[:3])}): '
            'this one starts from the beginning, and overwrites them; continue it with --resume, '
            'or give another --work-dir',
            'current',
            logging.WARNING,
        )
    if not plain:
        add_protection(cfg)
    config = Path(cfg.work_dir, os.path.basename(cfg.filename or ''))
    if is_main_process() and config.is_symlink():
        # mmengine writes the config here, and would overwrite a link's target.
        config.unlink()
    return Start(checkpoint, files)


def add_protection(cfg: Config) -> None:
    """Adds `CheckpointHook`, `make_exact`, `AnomalyHook` and `TopologyHook` to a training's config.

    The config's own hooks stay; a warning names what is lost by one.
    """
    scope = cfg.get('default_scope')
    default_hooks = cfg.setdefault('default_hooks', ConfigDict())
    hook = default_hooks.setdefault('checkpoint', dict(type='CheckpointHook', interval=1))
    kind = None if hook is None else hook_class(hook, scope)
    if kind is hooks.CheckpointHook and isinstance(hook, dict):
        hook['type'] = 'mmvttt.CheckpointHook'
    elif kind is not None and not issubclass(kind, CheckpointHook):
        print_log(
            f'default_hooks.checkpoint is a {type_name(kind)}, which is kept: SIGTERM and Ctrl-C '
            'leave no checkpoint, a full disk ends the training, and a second training in the '
            'folder is not detected; derive it from mmvttt.openmmlab.reliability.CheckpointHook',
            'current',
            logging.WARNING,
        )
    custom = list(cfg.get('custom_hooks') or [])
    present = [hook_class(h, scope) for h in custom]
    missing = [kind for kind in (TopologyHook, AnomalyHook) if kind not in present]
    cfg.custom_hooks = custom + [dict(type=f'mmvttt.{kind.__name__}') for kind in missing]
    for reason in filter(None, (make_exact(cfg), unsaved_state(cfg.get('model')))):
        print_log(f'a resume of this training will not be exact: {reason}', 'current')


@contextmanager
def protect_runner(runner: Runner, start: Start) -> Iterator[None]:
    """Wraps `runner.train()`: locks the folder, checks the checkpoint, ends data workers.

    `start` is the result of `protect_config`.

    Raises:
        UsageError: Another training runs in the work directory, or has written to it since.
        CheckpointError: `load_from` cannot be read, or hardly matches the model.
        ResumeError: At the start of the training: the checkpoint belongs to another one.
    """
    checkpoint = start.checkpoint

    def require_unchanged() -> None:
        now = states(runner.work_dir)
        newer = [name for name in now if now[name] != start.files.get(name)]
        if newer:
            raise UsageError(
                f'another training has written {", ".join(newer[:3])} to {runner.work_dir!r} since '
                'this one was started, and ended: give this one another --work-dir, or continue '
                'the other with --resume'
            )

    lock = RunLock(runner.work_dir)
    try:
        lock.acquire(require_unchanged)
        if runner._resume:
            runner._load_from = checkpoint
            runner._resume = checkpoint is not None
            none = f'no checkpoint in {runner.work_dir} yet'
            runner.logger.info(f'resuming from {checkpoint}' if checkpoint else none)
        runner.register_hook(ComparePreparation())
        if checkpoint is not None:
            runner.register_hook(CompareOnLoad(checkpoint), priority='HIGHEST')
            runner.resume = partial(_resume, runner.resume)
        elif runner._load_from:
            require_weights(runner, read_content(runner._load_from), runner._load_from)
        yield
    except DataError:
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook):
                hook.save_before_error(runner)
        raise
    finally:
        end_workers(runner)
        lock.release()


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
