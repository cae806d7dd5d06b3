"""Output of a training on the screen: a summary; the log file has the whole config."""

from __future__ import annotations

import logging
from typing import Any

from mmengine.config import Config
from mmengine.runner import Runner
from torch import nn

from ..registry import type_name
from ..reliability.weights import checkpoints_of
from ..unwrap import bare_model

# Beginnings of mmengine's long messages: environment, config, hooks, a line for each parameter.
_LONG = (
    '\n---',
    'Config:',
    'Hooks will be executed',
    'Distributed training is not used',
    'paramwise_options',
)


def _is_short(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_LONG)


class QuietRunner(Runner):
    """mmengine's Runner, whose long messages go to the log file alone.

    The config is written when a training begins: one that is refused, and a test, leave the file.
    """

    def build_logger(self, *args: Any, **kwargs: Any) -> logging.Logger:
        """The logger of the run."""
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(_is_short)
        return logger

    def dump_config(self) -> None:
        """Waits for the training to begin: the folder may have the config of a former one."""

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Calls the hooks; a training that none of them has refused writes its config."""
        super().call_hook(fn_name, **kwargs)
        if fn_name == 'before_train':
            super().dump_config()


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
