"""Measures throughput, latency and peak memory of models (mmvttt.analysis.benchmark).

Writes a CSV that names the machine, and draws it against the height of the image: throughput and
memory as in vision-ttt Fig. 6, and latency. The FLOPs of that figure are counted by get_flops.py.
timm's ViTs run fused attention; for the papers' DeiT, which stores all T² weights of a head, set
TIMM_FUSED_ATTN=0.

example: python tools/benchmark.py vittt_tiny_patch16_224 deit_tiny_patch16_224 \\
           --sizes 224 512 1024 --batch 8 --device cuda --dtype bfloat16 --plot fig6.png
"""

import argparse

import torch
from rich.progress import track

from mmvttt.analysis.benchmark import Measurement, measure, plot, write_csv
from mmvttt.analysis.models import DenseForward, find_model, image_channels
from mmvttt.cli import (
    add_cfg_options,
    command_line,
    not_negative,
    plain_errors,
    positive,
    usable_device,
)
from mmvttt.config import find_config
from mmvttt.engine import compile_blocks


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument(
        'models', nargs='+', help="configs, names of ours, or models of timm's registry"
    )
    parser.add_argument(
        '--sizes',
        nargs='+',
        type=positive,
        default=[224],
        help='sides of the (square) images in pixels',
    )
    parser.add_argument('--batch', nargs='+', type=positive, default=[1], help='images at once')
    parser.add_argument(
        '--device',
        type=usable_device,
        default='cuda' if torch.cuda.is_available() else 'cpu',
    )
    parser.add_argument('--dtype', choices=('float32', 'bfloat16', 'float16'), default='float32')
    parser.add_argument('--train', action='store_true', help='time forward and backward')
    parser.add_argument('--backbone', action='store_true', help="leave out a config's heads")
    parser.add_argument(
        '--compile',
        action='store_true',
        help='then again with the blocks under torch.compile, as train.py --compile has them',
    )
    parser.add_argument(
        '--repeats', type=positive, default=10, help='timed batches; the median counts'
    )
    parser.add_argument('--warmup', type=not_negative, default=3, help='batches before them')
    parser.add_argument('--out', default='work_dirs/benchmark.csv', help='the CSV')
    parser.add_argument('--plot', help='an image file to draw, e.g. work_dirs/benchmark.png')
    add_cfg_options(parser)
    return parser.parse_args(argv)


def describe(row: Measurement) -> str:
    """A line for the screen."""
    what = f'{row.model} {row.mode} {row.batch} × {row.height}×{row.width}'
    if row.latency_ms is None:
        return f'{what}: out of memory'
    memory = '' if row.peak_mib is None else f', {row.peak_mib:.0f} MiB'
    return f'{what}: {row.latency_ms:.1f} ms, {row.images_per_s:.1f} images/s{memory}'


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    rows = []
    with plain_errors():
        mixed = any(find_config(name) is not None for name in args.models)
        for name in args.models:
            options = args.cfg_options or {}
            if mixed and find_config(name) is None:
                # What is meant for the configs beside it.
                options = {key: value for key, value in options.items() if '.' not in key}
            found = find_model(name, options)
            model = found.backbone if args.backbone else found.model
            cases = [(size, batch) for size in args.sizes for batch in args.batch]
            for compiled in (False, True) if args.compile else (False,):
                label = f'{found.name} (compiled)' if compiled else found.name
                if compiled:
                    compile_blocks(model)
                for size, batch in track(cases, description=label):
                    row = measure(
                        DenseForward(model),
                        label,
                        batch,
                        (size, size),
                        args.device,
                        getattr(torch, args.dtype),
                        args.train,
                        args.repeats,
                        args.warmup,
                        image_channels(model),
                    )
                    print(describe(row), flush=True)
                    rows.append(row)
    print(f'measurements: {write_csv(rows, args.out)}')
    if args.plot:
        print(f'plot: {plot(rows, args.plot)}')


if __name__ == '__main__':
    main()
