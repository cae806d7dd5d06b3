#!/usr/bin/env python3
"""Prints a model's parameters and FLOPs, by part and by op (mmvttt.analysis.flops).

FLOPs are multiply-accumulates, as in the papers. Needs no data set, no weights and no GPU.

example: mmvttt get_flops upernet_vittt_s_160k --shape 512 512
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmvttt import cli
from mmvttt.text import one_line

if TYPE_CHECKING:
    from mmvttt.analysis.flops import Cost


def tables(cost: Cost, depth: int) -> list[str]:
    """Lines of two tables: the parts and the ops, each with its share."""
    rows = [*cost.parts(depth), ('total', cost.total_params, cost.total_macs)]
    width = max(len(name) for name in ('part', *cost.by_op, *(row[0] for row in rows)))
    lines = [f'{"part":{width}}{"parameters":>14}{"GFLOPs":>11}{"share":>8}']
    total = max(cost.total_macs, 1)
    for name, params, macs in rows:
        lines.append(f'{name:{width}}{params:14,}{macs / 1e9:11.3f}{macs / total:8.1%}')
    lines += ['', f'{"op":{width}}{"":14}{"GFLOPs":>11}{"share":>8}']
    for name, macs in cost.by_op.items():
        lines.append(f'{name:{width}}{"":14}{macs / 1e9:11.3f}{macs / total:8.1%}')
    return [*lines, '']


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('model', help='a config file, the name of a shipped one, or a timm model')
    cli.add_shape(parser)
    add('--depth', type=cli.positive, default=2, help='levels of modules to list; default: 2')
    add('--backbone', action='store_true', help="leave out a config's heads")
    cli.add_cfg_options(parser)
    args = parser.parse_args()
    with cli.plain_errors():
        from mmvttt.analysis.flops import count_cost
        from mmvttt.by_name import find_model
        from mmvttt.named_model import image_channels

        named = find_model(args.model, args.cfg_options, weightless=True)
        size = tuple(args.shape or named.size)
        model = named.backbone if args.backbone else named.model
        cost = count_cost(named.dense(model), size, image_channels(model))
    print(*tables(cost, args.depth), sep='\n')
    print(
        f'{one_line(named.name)} at {size[0]}×{size[1]}: {cost.total_params / 1e6:.3f} M '
        f'parameters, {cost.total_macs / 1e9:.3f} GFLOPs (multiply-accumulates)'
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
