"""Types of options for argparse, that say what is wrong with a value and what is allowed."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.config import DictAction


def positive(text: str) -> int:
    """An integer of 1 or more."""
    return _counted(text, 1)


def not_negative(text: str) -> int:
    """An integer of 0 or more."""
    return _counted(text, 0)


def _counted(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f'{text!r}: give an integer, {least} or more')
    return number


def usable_device(text: str) -> str:
    """A device that torch knows, and that is there."""
    try:
        torch.empty(1, device=text)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition('\n')[0]
        raise argparse.ArgumentTypeError(f"{text!r} is not there, give 'cpu': {reason}") from error
    return text


class Options(DictAction):
    """mmengine's `KEY=VALUE …`, with an error for what is no such pair."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Sequence[str], *rest: Any
    ) -> None:
        """Stores the pairs."""
        for pair in values:
            if not pair.partition('=')[0] or '=' not in pair:
                parser.error(f'{rest[0]} {pair!r}: write KEY=VALUE, e.g. train_cfg.max_epochs=1')
        super().__call__(parser, namespace, values, *rest)
