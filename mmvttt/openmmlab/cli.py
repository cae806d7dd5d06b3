"""Options of the command lines of tools/ that concern a config of OpenMMLab."""

import argparse
import ast
from collections.abc import Sequence
from typing import Any

from mmengine.config import DictAction

# The tools of OpenMMLab find all of it here.
from ..cli import (
    EXPLAIN,
    add_device,
    add_shape,
    command_line,
    default_device,
    new_file,
    new_folder,
    not_negative,
    plain_errors,
    positive,
    printable,
    usable_device,
)
from ..errors import UsageError
from .build_errors import explain_build

__all__ = [
    'Options',
    'add_cfg_options',
    'add_config',
    'add_device',
    'add_exported',
    'add_launcher',
    'add_shape',
    'command_line',
    'default_device',
    'new_file',
    'new_folder',
    'not_negative',
    'plain_errors',
    'positive',
    'printable',
    'usable_device',
]


EXPLAIN.append(explain_build)


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


def add_exported(parser: argparse.ArgumentParser) -> None:
    """The options --onnx and --openvino, of one meaning: the suffix tells which it is."""
    parser.add_argument(
        *('--onnx', '--openvino'),
        dest='file',
        metavar='FILE',
        help='predict by this .onnx or .xml of tools/export.py, on the CPU; the checkpoint has the '
        'names of the classes; --amp computes in bf16, in OpenVINO alone',
    )


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
