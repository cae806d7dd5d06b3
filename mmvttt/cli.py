"""Shared parts of the command lines of tools/: parsers, options, types, errors."""

from __future__ import annotations

import argparse
import ast
import errno
import math
import os
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from .arguments import check_device
from .errors import CheckpointError, DataError, UsageError
from .outputs import check_new_file, check_new_folder
from .text import one_line, shown


class Parser(argparse.ArgumentParser):
    """A parser whose errors show arguments, such as names of files, without control characters."""

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))


def _one_line_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    return f'{filename}:{lineno}: {category.__name__}: {one_line(message)}\n'


def _plain_traceback(kind: type[BaseException], error: BaseException, *_: object) -> None:
    print(shown(''.join(traceback.format_exception(error)), sys.maxsize), end='', file=sys.stderr)


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose --help is the docstring of a tool, as it is written.

    A tool imports what it needs after it has parsed its arguments: --help is quick, and works on
    any machine. Names from strangers' files in its warnings, which are one line each and shown by
    one process of a node, and in tracebacks have no control characters.
    """
    warnings.formatwarning = _one_line_warning
    sys.excepthook = _plain_traceback
    if os.environ.get('LOCAL_RANK', '0') != '0':
        warnings.simplefilter('ignore')
    # Threads of torch wait for each other by spinning, for milliseconds: where other programs have
    # the cores, steps take many times as long. torch reads this when it is imported.
    os.environ.setdefault('GOMP_SPINCOUNT', '3000')
    return Parser(
        prog=f'mmvttt {tool_name(sys.argv[0])}',
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def tool_name(path: str | os.PathLike[str]) -> str:
    """The name by which `mmvttt` runs a file of tools/."""
    name = os.path.basename(path).removesuffix('.py')
    return 'predict' if name == 'image_demo' else name


def add_shape(parser: argparse.ArgumentParser, name: str = '--shape', **options: Any) -> None:
    """The option --shape HEIGHT WIDTH, of the images in pixels."""
    options.setdefault(
        'help', 'default: 800 1333 for detectors, 512 512 for segmentors, else 224 224'
    )
    metavar = ('HEIGHT', 'WIDTH')
    parser.add_argument(name, nargs=2, type=positive, metavar=metavar, **options)


def add_config(parser: argparse.ArgumentParser, name: str = 'config', **options: Any) -> None:
    """The argument `name`: a config, as `mmvttt.openmmlab.config.find_config` takes it."""
    options.setdefault('help', "path of a config, or the name of one of mmvttt's")
    parser.add_argument(name, **options)


def add_cfg_options(
    parser: argparse.ArgumentParser, example: str = 'train_cfg.max_epochs=1'
) -> None:
    """The option --cfg-options KEY=VALUE …, which changes a config or a timm model's arguments."""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Options,
        metavar='KEY=VALUE',
        help=f"change entries of the config, e.g. {example}, or arguments of timm's model",
    )


def add_launcher(parser: argparse.ArgumentParser) -> None:
    """The option --launcher, and the --local-rank that older launchers pass."""
    parser.add_argument('--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none')
    # For those that do not set the environment variable LOCAL_RANK.
    parser.add_argument('--local-rank', '--local_rank', type=int, default=0, help=argparse.SUPPRESS)


def add_exported(parser: argparse.ArgumentParser) -> None:
    """The options --onnx and --openvino, of one meaning: the suffix tells which it is."""
    parser.add_argument(
        *('--onnx', '--openvino'),
        dest='file',
        metavar='FILE',
        help='predict by this .onnx or .xml of tools/export.py, on the CPU; the checkpoint has the '
        'names of the classes; --amp computes in bf16, in OpenVINO alone',
    )


class Options(argparse.Action):
    """`KEY=VALUE …` as a dict: a value is a Python literal, several with commas, or else a text."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *rest: Any
    ) -> None:
        """Adds the pairs."""
        pairs = dict(getattr(namespace, self.dest) or {})
        for key, equals, text in (pair.partition('=') for pair in values):
            if not key or not equals:
                parser.error(f'{rest[0]} {key!r}: write KEY=VALUE, e.g. train_cfg.max_epochs=1')
            try:
                items = ast.literal_eval(f'[{text}]')
            except (SyntaxError, ValueError):
                if text.startswith(('[', '(', '{', 'dict(')):
                    parser.error(
                        f"{rest[0]} {key}={text}: write a Python literal, such as ['a', 'b'] or "
                        "{'a': 1}, and the whole in quotes for the shell"
                    )
                words = {'true': True, 'false': False}
                items = [words.get(item.lower(), item) for item in text.split(',')]
            pairs[key] = items if len(items) > 1 else items[0] if items else ''
        setattr(namespace, self.dest, pairs)


def _counted(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f'{text!r}: give an integer, {least} or more')
    return number


def duration(text: str) -> float:
    """A positive number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f'{text!r}: give a positive number')
    return number


# Integers, of 1 or more and of 0 or more.
positive, not_negative = partial(_counted, 1), partial(_counted, 0)


def _tried(check: Callable[[str], None], text: str) -> str:
    try:
        check(text)
    except UsageError as error:
        # argparse shows no other error's message.
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


# Places to write, tried when the arguments are read: hours of work may come before it.
new_file = partial(_tried, check_new_file)
new_folder = partial(_tried, check_new_folder)


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option --device, by default `default_device()`."""
    help = 'default: a GPU if there is one'
    parser.add_argument('--device', type=partial(_tried, check_device), help=help)


def default_device() -> str:
    """'cuda' where there is a GPU, else 'cpu'."""
    import torch

    return 'cuda' if torch.cuda.is_available() else 'cpu'


# Options of the tools that are not called as the arguments of our functions.
_FLAGS = dict(dtype='--amp', precision='--amp, --dtype', size='--shape')


def _flags(arguments: Sequence[str]) -> str:
    """The end of an error's message: the options of the tools for these arguments."""
    flags = (_FLAGS.get(name, f'--{name}'.replace('_', '-')) for name in arguments)
    return f' ({", ".join(flags)})' if arguments else ''


# Reasons why a write fails, and what to do.
_DISK = {
    errno.ENOSPC: 'the disk is full: make room',
    errno.EDQUOT: 'your quota on its disk is used up: remove files of yours there',
    errno.EFBIG: 'it is larger than files may be here (`ulimit -f`): raise the limit',
    errno.EIO: 'its disk does not answer: see that it is there',
    errno.ESTALE: 'its network disk has changed: mount it again',
}


@contextmanager
def plain_errors(launcher: str = 'pytorch', stopped: str = 'stopped') -> Iterator[None]:
    """Turns errors of mmvttt's own checks into their message on stderr and exit status 1.

    Other errors keep their traceback. Ctrl-C says `stopped`, with status 130. Ranks get the same
    error, and one of each node prints it; with `launcher='none'` each process.
    """
    status = 1
    try:
        yield
        # Not at the end of the process, where nothing can catch a BrokenPipeError.
        sys.stdout.flush()
    except (UsageError, DataError, CheckpointError) as error:
        # A data worker's error comes with the traceback of its process.
        message = str(error).strip()
        if message.startswith('Caught '):
            message = message.splitlines()[-1].partition('Error: ')[2]
        message = one_line(message, 10_000) + _flags(getattr(error, 'arguments', ()))
    except KeyboardInterrupt:
        message, status = stopped, 130
    except ModuleNotFoundError as error:
        from .distributions import missing

        if (sentence := missing(error.name or '')) is None:
            raise
        message = sentence
    except BrokenPipeError:
        if not _reader_left():
            raise
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in _DISK:
            raise
        place = f'{error.filename!r} cannot be written' if error.filename else 'nothing is written'
        message = f'{place}, because {_DISK[error.errno]}, and start again'
    else:
        return
    if launcher == 'none' or os.environ.get('LOCAL_RANK', '0') == '0':
        print(f'error: {message}' if status == 1 else message, file=sys.stderr)
    raise SystemExit(status) from None


def _reader_left() -> bool:
    """Whether the reader of stdout, such as `head`, has left. If so, drops what it has not read."""
    stdout = select.poll()
    stdout.register(sys.stdout, 0)
    left = bool(stdout.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left
