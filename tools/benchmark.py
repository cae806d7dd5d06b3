#!/usr/bin/env python3
"""Measures FLOPs, peak memory, latency and GPU time of models (mmvttt.analysis.benchmark).

Writes a CSV that names the machine, and plots it against image size like vision-ttt Fig. 6, with
slopes. --computed needs no machine: FLOPs and memory come from shapes.

The papers compare with attention that stores all T² weights of a head, but today's libraries run
fused attention, which does not: --attention runs timm's models with either or both.

example: mmvttt benchmark vittt_tiny_patch16_224 deit_tiny_patch16_224 \\
           --sizes 224 512 1024 --attention fused materialised --plot curves.png
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmvttt import cli

if TYPE_CHECKING:
    from torch import nn

DTYPES = ('float32', 'bfloat16', 'float16')
PANELS = ('gflops', 'peak_mib', 'latency_ms')


def parse_args() -> argparse.Namespace:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('models', nargs='*', help="configs, names of ours, or models of timm's registry")
    help = 'sides of square images'
    add('--sizes', nargs='+', type=cli.positive, default=[], help=help)
    cli.add_shape(parser, help='one more size, not square, e.g. 800 1333; default: 224 224')
    add('--batch', type=cli.positive, default=1, help='images at once')
    cli.add_device(parser)
    help = 'of the computation, by autocast'
    add('--dtype', nargs='+', choices=DTYPES, default=['float32'], help=help)
    kinds = ('fused', 'materialised')
    help = "softmax attention of timm's models"
    add('--attention', nargs='+', choices=kinds, default=['fused'], help=help)
    add('--computed', action='store_true', help='FLOPs and memory from shapes, at float32')
    add('--train', action='store_true', help='time forward and backward')
    add('--backbone', action='store_true', help="leave out a config's heads")
    help = 'then again with the blocks under torch.compile, as train.py --compile has them'
    add('--compile', action='store_true', help=help)
    help = 'then again by a CUDA graph: inference without the time of the host'
    add('--cuda-graph', action='store_true', help=help)
    help = 'then .onnx and .xml files of tools/export.py'
    options = dict(dest='files', nargs='+', default=[], action='extend', metavar='FILE')
    add('--onnx', '--openvino', **options, help=help)
    add('--repeats', type=cli.positive, default=10, help='timed batches; the median counts')
    add('--out', type=cli.new_file, default='work_dirs/benchmark.csv', help='the CSV')
    add('--plot', type=cli.new_file, help='an image file to draw, e.g. work_dirs/benchmark.png')
    help = 'columns that --plot draws'
    add('--panels', nargs='+', choices=PANELS, default=PANELS, help=help)
    cli.add_cfg_options(parser)
    args = parser.parse_args()
    if not args.models + args.files:
        parser.error('give models or exported files')
    if (args.files or args.cuda_graph) and (args.train or args.computed):
        parser.error('exported files and --cuda-graph are for inference: no --train, no --computed')
    if args.files and args.device not in (None, 'cpu'):
        parser.error('exported files run on the CPU: add --device cpu')
    fixed = args.computed or any(path.endswith('.onnx') for path in args.files)
    if fixed and args.dtype != ['float32']:
        parser.error('--computed and .onnx files have a type of their own: leave out --dtype')
    return args


def networks(args: argparse.Namespace) -> Iterator[tuple[str, str, nn.Module]]:
    """Names, ways and networks: each eager, by a CUDA graph and compiled, then files."""
    from mmvttt.by_name import find_model
    from mmvttt.deploy.runtime import open_exported

    for name in args.models:
        named = find_model(name, args.cfg_options, weightless=args.computed)
        model = named.backbone if args.backbone else named.model
        yield named.name, '', named.dense(model)
        if args.cuda_graph:
            yield named.name, 'CUDA graph', named.dense(model)
        if args.compile:
            yield named.name, 'compiled', named.dense(model)
    for path in args.files:
        file = open_exported(path)
        yield Path(path).stem, file.runtime, file


def main() -> None:
    args = parse_args()
    sizes = [(side, side) for side in args.sizes] + ([tuple(args.shape)] if args.shape else [])
    sizes = sizes or [(224, 224)]
    mode = 'training' if args.train else 'inference'
    rows: list[dict[str, Any]] = []
    with cli.plain_errors():
        import torch

        from mmvttt.analysis.benchmark import (
            has_attention,
            machine,
            measure,
            with_attention,
        )
        from mmvttt.analysis.complexity import computed_peak, plot
        from mmvttt.analysis.flops import count_cost
        from mmvttt.analysis.tables import write_csv
        from mmvttt.deploy.compile import compile_blocks, compiling
        from mmvttt.deploy.prepare import prepare
        from mmvttt.deploy.runtime import ExportedFile, OpenVINOFile
        from mmvttt.named_model import image_channels

        device = args.device or ('cpu' if args.files else cli.default_device())
        about = machine(device) | (dict(device='computed') if args.computed else {})
        for name, way, network in networks(args):
            file = isinstance(network, ExportedFile)
            channels = network.shape[1] if file else image_channels(network)
            ours = any('mmvttt.models' in type(part).__module__ for part in network.modules())
            kinds = args.attention if has_attention(network) else ['']
            for kind, dtype, (height, width) in product(kinds, args.dtype, sizes):
                network = with_attention(network, kind) if kind else network
                shape = (args.batch, channels, height, width)
                values = {}
                if not way:
                    macs = count_cost(network, (height, width), channels).total_macs
                    values['gflops'] = round(args.batch * macs / 1e9, 4)
                if args.computed:
                    values['peak_mib'] = round(computed_peak(network, shape, args.train), 1)
                else:
                    run = OpenVINOFile(network.path, dtype, shape) if way == 'OpenVINO' else network
                    run = run.to(device).eval()
                    if way == 'compiled':
                        compile_blocks(run)
                    run = prepare(run, cuda_graph=way == 'CUDA graph')
                    images = torch.rand(shape, device=device)
                    precision = getattr(torch, dtype)
                    with compiling() if args.compile else nullcontext():
                        values |= measure(run, images, precision, args.train, args.repeats)
                if file:
                    # torch does not see its memory.
                    values.pop('peak_mib', None)
                several = dtype if len(args.dtype) > 1 else ''
                remarks = ', '.join(filter(None, (kind, way, several)))
                line = f'{name} ({remarks})' if remarks else name
                row = dict(line=line, mode=mode, batch=args.batch, height=height, width=width)
                rows.append(row | dict(dtype=dtype, ours=ours) | values | about)
                write_csv(rows, args.out)
                missing = 'latency_ms' not in values and not args.computed
                figures = [f'{k} {v:.4g}' for k, v in values.items()] + ['out of memory'] * missing
                what = f'{line} {mode} {dtype} {args.batch} × {height}×{width}'
                print(f'{what}: {", ".join(figures)}', flush=True)
        print(f'measurements: {args.out}')
        if args.plot:
            print(f'plot: {plot(rows, args.plot, args.panels)}')


if __name__ == '__main__':
    main()
