"""Output of a training on the screen: a summary; the log file has the whole config."""

from __future__ import annotations

import logging
from typing import Any

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

from ..registry import type_name
from ..reliability.weights import checkpoints_of
from ..unwrap import bare_model


class QuietRunner(Runner):
    """mmengine's Runner, of which the screen shows what hooks say, and warnings.

    All the rest is in the log file: what is logged while parts are built, loaded and evaluated. A
    test shows its evaluation too. The config is written when a training begins: one that is
    refused, and a test, leave the file.
    """

    def build_logger(self, *args: Any, **kwargs: Any) -> logging.Logger:
        """The logger of the run."""
        logger = super().build_logger(*args, **kwargs)
        self._screens = [h for h in logger.handlers if not isinstance(h, logging.FileHandler)]
        self._show(logging.WARNING)
        return logger

    def _show(self, level: int) -> None:
        for handler in self._screens:
            handler.setLevel(level)

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


class SummaryHook(Hook):
    """Logs model, weights, and where a run writes: a line each."""

    priority = 'HIGHEST'

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def before_run(self, runner: Runner) -> None:
        runner.logger.info(f'\n{summary(runner, self.cfg)}')


def summary(runner: Runner, cfg: Config) -> str:
    """Model, weights, and where the run writes: a line each."""
    model, size = bare_model(runner.model), ''
    # FlexibleRunner builds the model later.
    if isinstance(model, nn.Module):
        size = f', {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters'
    return (
        f'model     {_names(cfg.model)}{size}\n'
        f'weights   {_weights(runner, cfg)}\n'
        f'writes    {runner.work_dir}; its log has the whole config'
    )


def _weights(runner: Runner, cfg: Config) -> str:
    if runner._load_from:
        return f'{"resumed from " if runner._resume else ""}{runner._load_from}'
    return ', '.join(dict.fromkeys(checkpoints_of(cfg.model))) or 'random'


def _names(model: dict) -> str:
    """`MaskRCNN(mmvttt.ViTAdapter(mmvttt.Vittt))`."""
    inner, name = model.get('backbone'), type_name(model['type'])
    return f'{name}({_names(inner)})' if isinstance(inner, dict) else name
