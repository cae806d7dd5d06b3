"""Prints the peak memory of a training step by kind.

On a GPU it is measured, elsewhere computed from the tensors of a step that is not computed. Needs
no data set and no weights. With more than one case (configs, --with-cp, --amp) it prints a table.

example: python tools/get_memory.py maskrcnn_vittt_s_1x --with-cp none all --amp none bf16
"""

import argparse
from itertools import product

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mmvttt.openmmlab.analysis.memory.report import (
    CHECKPOINTING,
    COMPUTED,
    MemoryUse,
    memory_use,
    to_row,
    to_table,
    write_csv,
)
from mmvttt.openmmlab.analysis.memory.training_step import PRECISIONS
from mmvttt.openmmlab.cli import add_cfg_options, add_shape, command_line, plain_errors, positive


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('configs', nargs='+', help='config files, or names of shipped ones')
    parser.add_argument('--batch', type=positive, default=2, help='images of a step; default: 2')
    add_shape(parser, help="default: what images are padded to, or the papers' size")
    parser.add_argument(
        '--amp', nargs='+', choices=PRECISIONS, default=[None], help="default: the config's"
    )
    parser.add_argument(
        '--with-cp',
        nargs='+',
        choices=CHECKPOINTING,
        default=[None],
        help="what is recomputed: none, the backbone's blocks, or all that can be (an adapter's "
        "injectors and extractors too); default: the config's",
    )
    parser.add_argument(
        '--computed', action='store_true', help='do not measure, even where there is a GPU'
    )
    parser.add_argument(
        '--depth', type=positive, default=2, help='levels of modules to list; default: 2'
    )
    parser.add_argument('--out', metavar='FILE.csv', help='write the numbers to a file')
    add_cfg_options(parser)
    return parser.parse_args(argv)


def parts_table(use: MemoryUse, depth: int) -> Table:
    """Weights and activations by part of the model; a part's own parts follow it."""
    table = Table('part', 'weights, MiB', 'activations, MiB', 'share', title='By part')
    for name, (weights, activations) in use.parts.items():
        # Indices of blocks are not levels.
        if name and sum(not word.isdigit() for word in name.split('.')) <= depth:
            share = activations / max(use.activations, 1)
            table.add_row(name, _mib(weights), _mib(activations), f'{share:.1%}')
    return table


def peak_table(use: MemoryUse) -> Table:
    """Table of the memory held at the peak, by kind."""
    table = Table('at the peak', 'MiB')
    for kind, nbytes in use.at_peak.items():
        if nbytes:
            table.add_row(kind, _mib(nbytes))
    if use.how != COMPUTED:
        table.add_row('within kernels, rounding', _mib(use.peak - sum(use.at_peak.values())))
    return table


def describe(use: MemoryUse) -> str:
    """The sentence under the tables."""
    how = 'computed, without what kernels allocate for themselves'
    if use.how != COMPUTED:
        how = f'measured on {use.how}'
    return (
        f'{use.config}, {use.batch} images of {use.height}×{use.width}: a peak of '
        f'{_mib(use.peak)} MiB, {how}; weights {_mib(use.weights)}, gradients '
        f'{_mib(use.gradients)}, optimizer {_mib(use.optimizer)}, averaged copy '
        f'{_mib(use.average)}, activations saved for the backward pass {_mib(use.activations)}'
    )


def _mib(nbytes: int) -> str:
    return f'{nbytes / 2**20:,.1f}'


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = None
    if torch.cuda.is_available() and not args.computed:
        device = torch.device('cuda')
    size = tuple(args.shape) if args.shape else None
    cases = list(product(args.configs, args.with_cp, args.amp))
    console = Console(width=100)
    uses = []
    with plain_errors():
        for config, with_cp, amp in track(cases, console=Console(stderr=True)):
            uses.append(
                memory_use(config, args.batch, size, amp, with_cp, args.cfg_options, device)
            )
    for use in uses:
        if len(uses) == 1:
            console.print(parts_table(use, args.depth))
            console.print(peak_table(use))
        print(describe(use))
    if len(uses) > 1:
        print(f'\nPeak in GiB:\n\n{to_table([to_row(use) for use in uses])}')
    if args.out:
        print(f'numbers: {write_csv(uses, args.out)}')


if __name__ == '__main__':
    main()
