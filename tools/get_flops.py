"""Prints a model's parameters and FLOPs, by part and by op (mmvttt.analysis.flops).

FLOPs are multiply-accumulates, as in the papers. Needs no data set, no weights and no GPU.

example: python tools/get_flops.py upernet_vittt_s_160k --shape 512 512
"""

import argparse

from rich.console import Console
from rich.table import Table

from mmvttt.analysis.flops import Cost, count_cost
from mmvttt.openmmlab.analysis.models import DenseForward, find_model, image_channels
from mmvttt.openmmlab.cli import add_cfg_options, add_shape, command_line, plain_errors, positive


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('model', help='a config file, the name of a shipped one, or a timm model')
    add_shape(parser)
    parser.add_argument(
        '--depth', type=positive, default=2, help='levels of modules to list; default: 2'
    )
    parser.add_argument('--backbone', action='store_true', help="leave out a config's heads")
    add_cfg_options(parser)
    return parser.parse_args(argv)


def tables(cost: Cost, depth: int) -> list[Table]:
    """Table of the parts and the ops, each with its share."""
    parts = Table('part', 'parameters', 'GFLOPs', 'share', title='By part')
    rows = [*cost.parts(depth), ('total', cost.total_params, cost.total_macs)]
    for name, params, macs in rows:
        parts.add_row(name, f'{params:,}', f'{macs / 1e9:.3f}', _share(macs, cost))
    ops = Table('op', 'GFLOPs', 'share', title='By op')
    for name, macs in cost.by_op.items():
        ops.add_row(name, f'{macs / 1e9:.3f}', _share(macs, cost))
    return [parts, ops]


def _share(macs: int, cost: Cost) -> str:
    return f'{macs / max(cost.total_macs, 1):.1%}'


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        found = find_model(args.model, args.cfg_options, weightless=True)
        size = tuple(args.shape or found.size)
        model = found.backbone if args.backbone else found.model
        cost = count_cost(DenseForward(model), size, image_channels(model))
    console = Console(width=100)
    for table in tables(cost, args.depth):
        console.print(table)
    print(
        f'{found.name} at {size[0]}×{size[1]}: {cost.total_params / 1e6:.3f} M parameters, '
        f'{cost.total_macs / 1e9:.3f} GFLOPs (multiply-accumulates)'
    )
    if cost.uncounted:
        print(f'Without a FLOP formula, and missing above: {", ".join(cost.uncounted)}')
    if cost.idle:
        print(
            'Not run and counted as 0, being for training only or of work that depends on what is '
            f'found in the image: {", ".join(cost.idle)}'
        )


if __name__ == '__main__':
    main()
