"""Output of a training on the screen: a summary; the log file has the whole config."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.config import Config
from mmengine.runner import Runner
from torch import nn

from ..registry import type_name
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
        f'weights   {_weights(runner, cfg) or "random"}\n'
        f'writes    {runner.work_dir}; its log has the whole config'
    )


def layer_decay_advice(runner: Runner, cfg: Config) -> str | None:
    """A warning where rates that are meant for pretrained weights meet random ones."""
    paramwise = cfg.optim_wrapper.get('paramwise_cfg') or {}
    decay, new = paramwise.get('layer_decay_rate', 1), paramwise.get('new_lr_mult', 1)
    if (decay, new) == (1, 1) or _weights(runner, cfg) is not None:
        return None
    return (
        f'layer_decay_rate={decay} and new_lr_mult={new} are meant for pretrained weights, and '
        "these are random: set init_cfg=dict(type='Pretrained', checkpoint=…) in the backbone, or "
        'load_from (tools/inherit_weights.py makes one of a ViT), or both to 1'
    )


def _weights(runner: Runner, cfg: Config) -> str | None:
    """Source of the weights; None where they are random."""
    if runner._load_from:
        return f'{"resumed from " if runner._resume else ""}{runner._load_from}'
    return ', '.join(_checkpoints(cfg.model)) or None


def _checkpoints(config: Any) -> Iterator[str]:
    """Checkpoints that parts of a model are initialised from."""
    if isinstance(config, Mapping):
        source = config.get('checkpoint')
        if isinstance(source, str):
            yield source
        config = list(config.values())
    if isinstance(config, list | tuple):
        for part in config:
            yield from _checkpoints(part)


def _names(model: dict) -> str:
    """`MaskRCNN(mmvttt.ViTAdapter(mmvttt.Vittt))`."""
    inner, name = model.get('backbone'), type_name(model['type'])
    return f'{name}({_names(inner)})' if isinstance(inner, dict) else name
