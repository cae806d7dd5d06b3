"""Training from a config, for every toolbox, as tools/train.py does."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from mmengine import optim
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.registry import OPTIM_WRAPPERS, RUNNERS
from mmengine.runner import Runner
from torch import nn

from mmvttt.arguments import check_config
from mmvttt.checkpoints.sources import without_password
from mmvttt.errors import UsageError
from mmvttt.text import one_line

from ..config import load_config, named_entries
from ..engine.amp import AmpOptimWrapper
from ..engine.hooks.compile import CompileHook
from ..registry import BUILDING, hook_class, resolve_type, type_name
from ..reliability import protect_config, protect_runner
from ..reliability.weights import checkpoints_of, remove_checkpoints
from ..unwrap import bare_model

_WRAPPERS = (optim.OptimWrapper, optim.AmpOptimWrapper, AmpOptimWrapper)


class QuietRunner(Runner):
    """mmengine's Runner with a quiet screen, which shows warnings and what hooks log.

    The log file also has what is logged while parts are built, loaded and evaluated. A test shows
    its evaluation too. The config is written when a training begins, so that a training that is
    refused, or a test, does not replace the file of an earlier one.
    """

    # The level below which nothing is on the screen.
    least = logging.NOTSET

    def build_logger(self, log_level: int | str = 'INFO', **kwargs: Any) -> logging.Logger:
        """The logger of the run."""
        logger = super().build_logger(log_level, **kwargs)
        self._screens = [h for h in logger.handlers if not isinstance(h, logging.FileHandler)]
        # As mmengine has it: the other ranks show only errors.
        self._of_rank = logging.Handler(log_level if is_main_process() else logging.ERROR).level
        self._show(logging.WARNING)
        return logger

    def _show(self, level: int) -> None:
        for handler in self._screens:
            handler.setLevel(max(level, self.least, self._of_rank))

    def test(self) -> dict[str, float]:
        """Tests; the screen shows the tables of the metrics."""
        self._show(logging.INFO)
        return super().test()

    def dump_config(self) -> None:
        """Waits for the training to begin: the folder may have the config of a former one."""

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Calls the hooks; a training that none of them has refused writes its config."""
        levels = [handler.level for handler in self._screens]
        self._show(logging.INFO)
        super().call_hook(fn_name, **kwargs)
        for handler, level in zip(self._screens, levels, strict=True):
            handler.setLevel(level)
        if fn_name == 'before_train':
            super().dump_config()


class SilentRunner(QuietRunner):
    """A runner that leaves the screen to its caller; `end_silence` gives it back to the logger."""

    least = logging.CRITICAL

    def end_silence(self) -> None:
        """Shows warnings again: the logger outlives the run."""
        self.least = logging.NOTSET
        self._show(logging.WARNING)


@contextmanager
def off_screen(silent: bool = True) -> Iterator[None]:
    """Keeps log lines that belong to no run off the screen, for a report that fills it."""
    if not silent:
        yield
        return
    library, current = logging.getLogger('mmvttt'), MMLogger.get_current_instance()
    level, thread = library.level, get_ident()

    def is_shown(record: logging.LogRecord) -> bool:
        # The current logger may be that of a run in another thread.
        return record.thread != thread or record.levelno >= logging.ERROR

    library.setLevel(logging.ERROR)
    current.addFilter(is_shown)
    try:
        yield
    finally:
        library.setLevel(level)
        current.removeFilter(is_shown)


class _Built(Hook):
    """Lets other threads build once all parts of a training are built: it is called last."""

    priority = 'VERY_LOW'

    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release

    def before_train(self, runner: Runner) -> None:
        """Ends the building."""
        self.release()


class SummaryHook(Hook):
    """Logs model, weights, and where a run writes: a line each."""

    priority = 'HIGHEST'

    def before_run(self, runner: Runner) -> None:
        runner.logger.info(f'\n{summary(runner)}')


def summary(runner: Runner) -> str:
    """Model, weights, and where the run writes: a line each."""
    config, model, size = runner.cfg.model, bare_model(runner.model), ''
    # FlexibleRunner builds the model later.
    if isinstance(model, nn.Module):
        size = f', {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters'
    weights = ', '.join(dict.fromkeys(checkpoints_of(config))) or 'random'
    if runner._load_from:
        weights = f'{"resumed from " if runner._resume else ""}{runner._load_from}'
    lines = (
        f'model     {_names(config)}{size}',
        f'weights   {weights}',
        f'writes    {runner.work_dir}; its log has the whole config',
    )
    return '\n'.join(map(one_line, lines))


def _names(model: dict) -> str:
    """`MaskRCNN(mmvttt.ViTAdapter(mmvttt.Vittt))`."""
    inner, name = model.get('backbone'), type_name(model['type'])
    return f'{name}({_names(inner)})' if isinstance(inner, dict) else name


def build_runner(cfg: Config, silent: bool = False) -> Runner:
    """The runner of a config: mmengine's, or the one that `runner_type` names."""
    if 'runner_type' in cfg:
        return RUNNERS.build(cfg)
    return (SilentRunner if silent else QuietRunner).from_cfg(cfg)


def require_checkpoint(checkpoint: str | os.PathLike[str]) -> str:
    """The expanded path of a checkpoint, or its address without a password.

    Raises a UsageError if there is no such file.
    """
    source = os.path.expanduser(os.fspath(checkpoint))
    if '://' not in source and not os.path.isfile(source):
        raise UsageError(
            f'there is no checkpoint {source!r} (looked for {os.path.abspath(source)})'
        )
    return without_password(source)


def enable_amp(cfg: Config) -> None:
    """Switches to mixed precision: bf16 where the device has it, else fp16 with loss scaling.

    A `dtype` in the config stays. bf16 is the type to use with test-time training: in fp16
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


def choose_compile(cfg: Config, compile: bool | None = None) -> None:
    """Adds a `CompileHook` to a config, or with `compile=False` removes it.

    The config's `compile_blocks` holds options of torch.compile, or is False. None compiles on a
    GPU if `compile_blocks` is set and the parameters are not sharded.
    """
    scope, custom = cfg.get('default_scope'), list(cfg.get('custom_hooks') or [])
    hooks = [hook for hook in custom if hook_class(hook, scope) is CompileHook]
    options = cfg.get('compile_blocks')
    if options not in (None, False):
        check_config('compile_blocks', options, 'dict(dynamic=False) or False')
    if compile is False:
        cfg.custom_hooks = [hook for hook in custom if hook not in hooks]
        return
    required = bool(compile)
    if compile is None:
        compile = options not in (None, False) and get_device() == 'cuda' and 'strategy' not in cfg
    if compile and not hooks:
        hook = dict(type='mmvttt.CompileHook', options=dict(options or {}), required=required)
        cfg.custom_hooks = [*custom, hook]


def train(
    config: str | os.PathLike[str],
    *,
    resume: str | None = None,
    amp: bool = False,
    auto_scale_lr: bool = False,
    seed: int | None = None,
    deterministic: bool = False,
    plain: bool = False,
    compile: bool | None = None,
    hooks: Sequence[Hook] = (),
    silent: bool = False,
    **config_args: Any,
) -> Runner:
    """Trains what a config describes.

    Args:
        config: Path of a config; its `default_scope` decides the toolbox.
        resume: 'auto' (the latest checkpoint of the work directory or, without one, the config's
            `load_from`), or a path.
        amp: See `enable_amp`.
        auto_scale_lr: Scale the learning rate by the real batch over the config's
            `auto_scale_lr.base_batch_size`.
        seed: For all random numbers; default: the config's, or a new one.
        deterministic: Choose deterministic algorithms.
        plain: Leave the config as it is; see `mmvttt.openmmlab.reliability.add_protection`.
        compile: See `choose_compile`.
        hooks: Added to the config's.
        silent: Log to the file of the run only.
        config_args: See `load_config`.

    Returns:
        The runner, after training.

    Raises:
        UsageError: An option does not fit the config. See `protect_config` for the other errors,
            raised before anything is built, and `protect_runner`.
    """
    needed = ('model', 'train_dataloader', 'train_cfg', 'optim_wrapper')
    cfg = load_config(config, needed=needed, **config_args)
    if amp:
        enable_amp(cfg)
    if auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise UsageError(
                '--auto-scale-lr needs auto_scale_lr.base_batch_size, the number of images a step '
                'that the learning rate is for: set it in the config'
            )
        cfg.auto_scale_lr.enable = True
    choose_compile(cfg, compile)
    if cfg.get('pretrained') is False:
        cfg.load_from = None
    if cfg.get('pretrained') is False or (cfg.get('pretrained') and cfg.get('load_from')):
        # The whole model's weights take the place of the backbone's, which need not be downloaded.
        remove_checkpoints(cfg.model)
    if seed is not None:
        cfg.merge_from_dict({'randomness.seed': seed})
    if deterministic:
        cfg.merge_from_dict({'randomness.deterministic': True})
    weights = None
    if resume is not None:
        weights, cfg.resume = cfg.get('load_from'), True
        cfg.load_from = None if resume == 'auto' else require_checkpoint(resume)
    with ExitStack() as built, named_entries(cfg):
        # The default scope, by which types are found, is the process's.
        built.enter_context(BUILDING)
        with off_screen(silent):
            start = protect_config(cfg, plain=plain)
        weights = weights or cfg.get('load_from')
        if start.checkpoint is None and cfg.get('resume') and weights is not None:
            # Nothing to resume: the training begins where it would without --resume.
            cfg.resume, cfg.load_from = False, require_checkpoint(weights)
        runner = build_runner(cfg, silent)
        try:
            for hook in (SummaryHook(), *hooks, _Built(built.close)):
                runner.register_hook(hook)
            with protect_runner(runner, start):
                runner.train()
        finally:
            if isinstance(runner, SilentRunner):
                runner.end_silence()
    return runner
