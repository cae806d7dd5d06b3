"""Reads the config and finds the checkpoint of a training or a test."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mmengine.config import Config

from mmvttt.checkpoints.sources import without_password
from mmvttt.errors import UsageError

from ..config import load_config


def read_config(path: str | os.PathLike[str], needed: Sequence[str], **options: Any) -> Config:
    """Reads a config and downloads its checkpoints behind URLs with a password.

    Args:
        path: Of the config.
        needed: Entries without which it cannot be used.
        options: See `load_config`.

    Raises:
        UsageError: An entry is missing, or the config cannot be read.
    """
    cfg = load_config(path, **options)
    missing = [key for key in needed if cfg.get(key) is None]
    if missing:
        raise UsageError(
            f"the config '{cfg.filename}' has no {', '.join(missing)}; it may be a part for the "
            '_base_ of another one'
        )
    _fetch_private(cfg)
    return cfg


def existing(checkpoint: str | os.PathLike[str]) -> str:
    """A checkpoint's path, expanded, or its address without a password.

    Raises:
        UsageError: There is no such file.
    """
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
