"""Shared parts of the command lines of tools/: parsers, options, types of values, plain errors."""

import argparse
import ast
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.config import DictAction

from ..errors import CheckpointError, DataError, UsageError
from .build_errors import explain_build


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose --help is the docstring of a tool, as it is written."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_config(parser: argparse.ArgumentParser, name: str = 'config', **options: Any) -> None:
    """The argument `name`: a config, as `mmvttt.openmmlab.config.find_config` takes it."""
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


def add_shape(parser: argparse.ArgumentParser, name: str = '--shape', **options: Any) -> None:
    """The option --shape HEIGHT WIDTH, of the images in pixels."""
    options.setdefault(
        'help', 'default: 800 1333 for detectors, 512 512 for segmentors, else 224 224'
    )
    metavar = ('HEIGHT', 'WIDTH')
    parser.add_argument(name, nargs=2, type=positive, metavar=metavar, **options)


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


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option --device, by default a GPU where there is one."""
    default = 'cuda' if torch.cuda.is_available() else 'cpu'
    parser.add_argument('--device', type=_usable_device, default=default)


def add_exported(parser: argparse.ArgumentParser) -> None:
    """The options --onnx and --openvino, of one meaning: the suffix tells which it is."""
    parser.add_argument(
        *('--onnx', '--openvino'),
        dest='file',
        metavar='FILE',
        help='predict by this .onnx or .xml of tools/export.py, on the CPU; the checkpoint has the '
        'names of the classes; --amp computes in bf16, in OpenVINO alone',
    )


def _usable_device(text: str) -> str:
    """A device that torch knows, and that is there."""
    try:
        torch.empty(1, device=text)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition('\n')[0]
        raise argparse.ArgumentTypeError(f"{text!r} is not there, give 'cpu': {reason}") from error
    return text


class Options(DictAction):
    """mmengine's `KEY=VALUE …`, and `KEY=[dict(…)]`; an error for what is no such pair."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Sequence[str], *rest: Any
    ) -> None:
        """Stores the pairs."""
        for pair in values:
            if not pair.partition('=')[0] or '=' not in pair:
                parser.error(f'{rest[0]} {pair!r}: write KEY=VALUE, e.g. train_cfg.max_epochs=1')
        try:
            super().__call__(parser, namespace, values, *rest)
        except UsageError as error:
            parser.error(str(error))

    @staticmethod
    def _parse_iterable(val: str) -> Any:
        """A value, with the dicts at which mmengine's own parser recurses without end."""
        if 'dict(' not in val and '{' not in val:
            return DictAction._parse_iterable(val)
        try:
            return ast.literal_eval(_Dicts().visit(ast.parse(val, mode='eval')))
        except (SyntaxError, ValueError) as error:
            raise UsageError(
                f'--cfg-options: {val!r} cannot be read ({error}): quote the texts in it, as in '
                '"custom_hooks=[dict(type=\'EMAHook\')]"'
            ) from None


class _Dicts(ast.NodeTransformer):
    """`dict(a=1)` as `{'a': 1}`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        named = all(keyword.arg for keyword in node.keywords)
        if not (isinstance(node.func, ast.Name) and node.func.id == 'dict' and named):
            return node
        if node.args:
            return node
        keys: list[ast.expr | None] = [ast.Constant(k.arg) for k in node.keywords]
        return ast.Dict(keys, [keyword.value for keyword in node.keywords])


def printable(text: object) -> str:
    """A text that shows control characters: a file's names could steer the terminal with them."""
    return ''.join(c if c.isprintable() or c == '\n' else repr(c)[1:-1] for c in str(text))


@contextmanager
def plain_errors(launcher: str = 'pytorch') -> Iterator[None]:
    """Turns errors whose message is enough into that message on stderr and exit status 1.

    Ranks get the same error, and one of each node prints it; with `launcher='none'` each process.
    """
    prints = launcher == 'none' or os.environ.get('LOCAL_RANK', '0') == '0'
    try:
        yield
    except (UsageError, DataError, CheckpointError) as error:
        if prints:
            # A data worker's comes with the traceback of its process.
            text = str(error).strip()
            if text.startswith('Caught '):
                text = text.splitlines()[-1].partition('Error: ')[2]
            print(f'error: {printable(text)}', file=sys.stderr)
        raise SystemExit(1) from None
    except (KeyError, TypeError, ValueError) as error:
        message = explain_build(error)
        if message is None:
            raise
        if prints:
            print(f'error: {message}', file=sys.stderr)
        raise SystemExit(1) from None
