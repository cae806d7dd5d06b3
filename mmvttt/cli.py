"""Shared parts of the command lines of tools/: parsers, options, types of values, plain errors."""

import argparse
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from mmengine.config import DictAction
from mmengine.registry import Registry

from . import registry as registries
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


def add_launcher(parser: argparse.ArgumentParser) -> None:
    """The option --launcher, and the --local-rank that older launchers pass."""
    parser.add_argument('--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none')
    # For those that do not set the environment variable LOCAL_RANK.
    parser.add_argument('--local-rank', '--local_rank', type=int, default=0, help=argparse.SUPPRESS)


def add_model_and_images(parser: argparse.ArgumentParser, out: str) -> None:
    """Arguments of tools that look into a model on some images; `out` is their default folder."""
    parser.add_argument('model', help='a config file, the name of a shipped one, or a timm model')
    parser.add_argument('images', nargs='+', type=Path)
    parser.add_argument('--checkpoint', help='the weights; default: random or those of init_cfg')
    parser.add_argument('--shape', nargs=2, type=positive, metavar=('HEIGHT', 'WIDTH'))
    parser.add_argument('--out', type=Path, default=Path(out))
    add_cfg_options(parser, 'model.backbone.arch=base')


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


def printable(text: object) -> str:
    """A text that shows control characters: a file's names could steer the terminal with them."""
    return ''.join(c if c.isprintable() or c == '\n' else repr(c)[1:-1] for c in str(text))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns errors whose message is enough into that message on stderr and exit status 1."""
    try:
        yield
    except (UsageError, DataError, CheckpointError) as error:
        # All ranks get the same error; one of each node prints it.
        if os.environ.get('LOCAL_RANK', '0') == '0':
            # That of a data worker comes with the traceback of its process.
            text = str(error).strip()
            if text.startswith('Caught '):
                text = text.splitlines()[-1].partition('Error: ')[2]
            print(f'error: {printable(text)}', file=sys.stderr)
        raise SystemExit(1) from None
    except (KeyError, TypeError, ValueError) as error:
        message = explain_build(error)
        if message is None:
            raise
        if os.environ.get('LOCAL_RANK', '0') == '0':
            print(f'error: {message}', file=sys.stderr)
        raise SystemExit(1) from None


def explain_build(error: KeyError | TypeError | ValueError) -> str | None:
    """A type that no registry has, an option that a type has not, or a value that it refuses.

    None for other errors.

    Args:
        error: The error of building something from a config.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    frame = next((f for f in frames[::-1] if f.f_code.co_name == 'build_from_cfg'), None)
    if frame is None:
        return None
    if isinstance(error, ValueError):
        # Checks of our own models name the option, its value and what to do.
        own = frames[-1].f_globals.get('__name__', '').startswith('mmvttt.')
        return str(error) if own else None
    kind = frame.f_locals.get('obj_type')
    if isinstance(error, KeyError):
        # Not a KeyError of the constructor, nor of a config without a type.
        if frame is not frames[-1] or not isinstance(kind, str):
            return None
        return f'there is no type {kind!r}{_did_you_mean(kind, _types(frame))}'
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    built: Any = frame.f_locals.get('obj_cls')
    # An error of the class or function itself or of the bases that it hands options on to.
    inner = frames[frames.index(frame) + 1 :]
    if found is None or not all(_is_own_init(f, built) for f in inner):
        return None
    # A constructor may hand a wrong option of its own to something else.
    refused = str(error).partition('.__init__')[0]
    if inner and refused not in [part.__qualname__ for part in inspect.getmro(built)]:
        return None
    options = _options(built)
    return (
        f'{built.__name__} has no option {found[1]!r}{_did_you_mean(found[1], options)}; it has '
        f'{", ".join(options)}'
    )


def _is_own_init(frame: FrameType, built: Any) -> bool:
    own = inspect.isclass(built) and isinstance(frame.f_locals.get('self'), built)
    return own and frame.f_code.co_name == '__init__'


def _options(built: Any) -> list[str]:
    """Names of the options of a function, or of a class and the bases it hands options on to."""
    names: dict[str, None] = {}
    for part in inspect.getmro(built) if inspect.isclass(built) else [built]:
        if inspect.isclass(part) and '__init__' not in vars(part):
            continue
        parameters = inspect.signature(part).parameters.values()
        names |= {p.name: None for p in parameters if p.kind != p.VAR_KEYWORD}
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def _types(frame: FrameType) -> list[str]:
    """Names in the registries that were asked, and mmvttt's, with their scope where it differs."""
    # A config that names none of our types has not imported them.
    import mmvttt.engine
    import mmvttt.models
    import mmvttt.reliability  # noqa: F401

    registry = frame.f_locals.get('registry')
    names = []
    while registry is not None:
        names += registry.module_dict
        registry = registry.parent
    own = [r for r in vars(registries).values() if isinstance(r, Registry)]
    return names + [f'mmvttt.{name}' for r in own if r.scope == 'mmvttt' for name in r.module_dict]


def _did_you_mean(name: str, names: list[str]) -> str:
    bare = name.rpartition('.')[2]
    # A name without its scope is the most frequent mistake.
    exact = [n for n in names if n.rpartition('.')[2] == bare and n != name]
    close = exact or get_close_matches(name, names, n=1) or get_close_matches(bare, names, n=1)
    return f', did you mean {close[0]!r}?' if close else ''
