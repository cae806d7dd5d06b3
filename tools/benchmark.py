"""Measures FLOPs, peak memory, latency and throughput of models (mmvttt.analysis.benchmark).

Writes a CSV that names the machine, and plots it against image size like vision-ttt Fig. 6, with
slopes, crossings and the papers' formulas as dotted lines. --computed needs
no machine: FLOPs and memory come from shapes, for images of any size.

The papers compare with attention that stores all T² weights of a head, but today's libraries run
fused attention, which does not: --attention runs timm's models with either or both.

example: python tools/benchmark.py vittt_tiny_patch16_224 deit_tiny_patch16_224 \\
           --sizes 224 512 1024 --attention fused materialised --plot curves.png
         python tools/benchmark.py --draw plain.csv stages.csv --plot curves.png
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import nn

from mmvttt.analysis.benchmark import (
    Measurement,
    choose_attention,
    compute,
    count,
    measure,
    read_csv,
    write_csv,
)
from mmvttt.analysis.cost_curves import describe_crossings, plot
from mmvttt.by_name import find_model
from mmvttt.cli import (
    add_cfg_options,
    add_device,
    add_shape,
    command_line,
    new_file,
    not_negative,
    plain_errors,
    positive,
)
from mmvttt.deploy.compile import compile_blocks
from mmvttt.deploy.runtime import ExportedFile, OnnxFile, OpenVINOFile
from mmvttt.errors import UsageError
from mmvttt.named_model import image_channels, is_timm

# Suffixes for models that ran in another way; their FLOPs are the same.
WAYS = COMPILED, GRAPH = ' (compiled)', ' (CUDA graph)'


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument(
        'models', nargs='*', help="configs, names of ours, or models of timm's registry"
    )
    parser.add_argument(
        '--sizes',
        nargs='+',
        type=positive,
        default=[224],
        help='sides of the (square) images in pixels',
    )
    add_shape(parser, help='a size that is not square, instead of --sizes, e.g. 800 1333')
    parser.add_argument('--batch', nargs='+', type=positive, default=[1], help='images at once')
    add_device(parser)
    parser.add_argument(
        '--dtype',
        nargs='+',
        choices=('float32', 'bfloat16', 'float16'),
        default=['float32'],
        help='of the computation, by autocast',
    )
    parser.add_argument(
        '--attention',
        nargs='+',
        choices=('fused', 'materialised'),
        default=['fused'],
        help="softmax attention of timm's models",
    )
    parser.add_argument(
        '--computed', action='store_true', help='FLOPs and memory from shapes, at float32'
    )
    parser.add_argument('--train', action='store_true', help='time forward and backward')
    parser.add_argument('--backbone', action='store_true', help="leave out a config's heads")
    parser.add_argument(
        '--compile',
        action='store_true',
        help='then again with the blocks under torch.compile, as train.py --compile has them',
    )
    parser.add_argument(
        '--onnx', nargs='+', default=[], metavar='FILE', help='then files of tools/export.py'
    )
    parser.add_argument(
        '--openvino', nargs='+', default=[], metavar='FILE.xml', help='then files of OpenVINO'
    )
    parser.add_argument(
        '--cuda-graph',
        action='store_true',
        help='then again by a CUDA graph: inference on a GPU, without the time of the host',
    )
    parser.add_argument(
        '--repeats', type=positive, default=10, help='timed batches; the median counts'
    )
    parser.add_argument('--warmup', type=not_negative, default=3, help='batches before them')
    parser.add_argument('--out', type=new_file, default='work_dirs/benchmark.csv', help='the CSV')
    parser.add_argument(
        '--plot', type=new_file, help='an image file to draw, e.g. work_dirs/benchmark.png'
    )
    parser.add_argument(
        '--draw', nargs='+', metavar='CSV', help='draw these tables, a row each; measure nothing'
    )
    parser.add_argument('--names', nargs='+', help='titles of the tables of --draw')
    add_cfg_options(parser)
    return parser.parse_args(argv)


def describe(row: Measurement) -> str:
    """A line for the screen."""
    what = f'{row.line} {row.mode} {row.dtype} {row.batch} × {row.height}×{row.width}'
    if row.latency_ms is None and row.peak_mib is None:
        return f'{what}: out of memory'
    figures = [] if row.gflops is None else [f'{row.gflops:.2f} GFLOPs']
    if row.latency_ms is not None:
        figures.append(f'{row.latency_ms:.1f} ± {row.spread_ms / 2:.1f} ms')
        figures.append(f'{row.images_per_s:.1f} images/s')
    if row.peak_mib is not None:
        figures.append(f'{row.peak_mib:.0f} MiB')
    return f'{what}: {", ".join(figures)}'


def models(args: argparse.Namespace) -> Iterator[tuple[str, nn.Module]]:
    """Names and networks: each unchanged, then by a CUDA graph, compiled; then exported files."""
    mixed = not all(map(is_timm, args.models))
    for name in args.models:
        options = args.cfg_options or {}
        if mixed and is_timm(name):
            # Only the keys that are not meant for the other configs.
            options = {key: value for key, value in options.items() if '.' not in key}
        named = find_model(name, options, weightless=args.computed)
        model = named.backbone if args.backbone else named.model
        yield named.name, named.dense(model)
        if args.cuda_graph:
            yield named.name + GRAPH, named.dense(model)
        if args.compile:
            compile_blocks(model)
            yield named.name + COMPILED, named.dense(model)
    for path in args.onnx:
        yield f'{Path(path).stem} (onnx)', OnnxFile(path)
    for path in args.openvino:
        yield f'{Path(path).stem} (openvino)', OpenVINOFile(path)


def run(args: argparse.Namespace, rows: list[Measurement]) -> None:
    """Measures or computes every case, prints it, and adds it to `rows`."""
    sizes = [tuple(args.shape)] if args.shape else [(side, side) for side in args.sizes]
    for name, model in models(args):
        kinds = args.attention if choose_attention(model, args.attention[0]) else ['']
        for kind, dtype, batch, size in product(kinds, args.dtype, args.batch, sizes):
            choose_attention(model, kind)
            row = one_case(args, name, model, dtype, batch, size)
            rows.append(replace(row, attention=kind))
            write_csv(rows, args.out)
            print(describe(rows[-1]), flush=True)


def one_case(
    args: argparse.Namespace,
    name: str,
    model: nn.Module,
    dtype: str,
    batch: int,
    size: tuple[int, int],
) -> Measurement:
    """Measures or computes one row."""
    case = name, batch, size
    file = model if isinstance(model, ExportedFile) else None
    if isinstance(file, OpenVINOFile):
        file = OpenVINOFile(file.path, dtype, (batch, file.shape[1], *size))
    network = file or model
    channels = file.shape[1] if file else image_channels(model)
    precision = getattr(torch, dtype)
    if args.computed:
        return compute(network, *case, args.train, channels)
    if file:
        # torch does not see its operations and memory.
        counted = dict(peak_mib=None)
    else:
        counted = {} if name.endswith(WAYS) else count(network, batch, size, channels)
    row = measure(
        network,
        *case,
        args.device,
        precision,
        args.train,
        args.repeats,
        args.warmup,
        channels,
        cuda_graph=name.endswith(GRAPH),
    )
    return replace(row, **counted)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        if bool(args.models or args.onnx or args.openvino) == bool(args.draw):
            raise UsageError('give models to measure, or tables to --draw')
        if args.draw and not args.plot:
            raise UsageError('--draw: say with --plot which image file to write')
        for option, given, device in (
            ('--onnx', args.onnx, 'cpu'),
            ('--openvino', args.openvino, 'cpu'),
            ('--cuda-graph', args.cuda_graph, 'cuda'),
        ):
            elsewhere = torch.device(args.device).type != device
            if given and (args.train or args.computed or elsewhere):
                raise UsageError(
                    f'{option} is for inference (no --train, no --computed) on --device {device}; '
                    'leave it out'
                )
        if args.onnx and args.dtype != ['float32']:
            raise UsageError('--onnx computes in the type that its export chose: leave out --dtype')
        if args.computed and args.dtype != ['float32']:
            raise UsageError('--computed counts at float32: leave out --dtype')
        if args.names and len(args.names) != len(args.draw or []):
            raise UsageError(f'--names: give {len(args.draw or [])}, one for each table of --draw')
        complete = True
        if args.draw:
            tables = [read_csv(path) for path in args.draw]
        else:
            tables = [[]]
            # After Ctrl-C, report what was measured so far.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                run(args, tables[0])
            except KeyboardInterrupt:
                print('missing: what comes after this, for it was interrupted', flush=True)
                complete = False
            if not tables[0]:
                raise UsageError('nothing was measured')
        for rows in tables:
            print(*describe_crossings(rows), sep='\n')
        if not args.draw:
            print(f'measurements: {write_csv(tables[0], args.out)}')
        if args.plot:
            print(f'plot: {plot(tables, args.plot, args.names)}')
    if not complete:
        sys.exit(1)


if __name__ == '__main__':
    main()
