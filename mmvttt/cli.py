"""What the command lines of tools/ share: parsers, options, types of values, plain errors."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.config import DictAction

from .errors import CheckpointError, DataError, UsageError


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose --help is the docstring of a tool, as it is written."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_config(parser: argparse.ArgumentParser, name: str = 'config', **options: Any) -> None:
    """The argument `name`: a config, as `mmvttt.config.find_config` takes it."""
    options.setdefault('help', "path of a config, or the name of one of mmvttt's")
    parser.add_argument(name, **options)


def add_cfg_options(
    parser: argparse.ArgumentParser, example: str = 'train_cfg.max_epochs=1'
) -> None:
    """The option --cfg-options KEY=VALUE …"""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Options,
        metavar='KEY=VALUE',
        help=f'change entries of the config, e.g. {example}',
    )


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


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns errors that a sentence explains into that sentence on stderr and exit status 1."""
    try:
        yield
    except (UsageError, DataError, CheckpointError) as error:
        # All ranks meet the same error; one of each node says it.
        if os.environ.get('LOCAL_RANK', '0') == '0':
            print(f'error: {error}', file=sys.stderr)
        raise SystemExit(1) from None
