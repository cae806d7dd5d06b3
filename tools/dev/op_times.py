"""Times a model's ops against torch.compile of their references, at the model's shapes, in bf16.

    python tools/dev/op_times.py vittt_small_patch16_224 128 224 224 --out op_times.csv

An op earns its place from a ratio of 1.15 on. A model is timm's, ours, or a config's backbone.
"""

import argparse
from unittest import mock

import torch
from torch.utils.benchmark import Timer

from mmvttt.analysis.benchmark import machine
from mmvttt.analysis.tables import write_csv
from mmvttt.by_name import find_model
from mmvttt.cli import add_device
from ttt_kernels._op import Op


def milliseconds(op: Op, module: object, args: tuple, compiled: bool) -> float:
    """Median time of an implementation's forward and backward pass."""

    def run(*args):
        out = op.run(module, args, True)
        grads = [torch.ones_like(x) for x in out[: op.results]]
        return op.run_backward(module, grads, args, out[op.results :], [True] * len(op.tensors))

    step = torch.compile(run, dynamic=False) if compiled else run
    for _ in range(3):
        step(*args)
    timer = Timer('step(*args)', globals=locals(), num_threads=torch.get_num_threads())
    return 1000 * timer.blocked_autorange(min_run_time=1).median


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('model')
    parser.add_argument('shape', nargs=3, type=int, help='batch, height and width')
    parser.add_argument('--out', default='op_times.csv')
    add_device(parser)
    args = parser.parse_args()
    model = find_model(args.model).model
    model = getattr(model, 'backbone', model).to(args.device).eval()
    images = torch.randn(args.shape[0], 3, *args.shape[1:], device=args.device)
    calls, call = {}, Op.__call__

    def recorded(op, *values, **options):
        calls.setdefault(op, op.prepare(values))
        return call(op, *values, **options)

    with torch.autocast(args.device, torch.bfloat16), mock.patch.object(Op, '__call__', recorded):
        model(images)
    about, rows = machine(args.device) | dict(model=args.model, shape=args.shape), []
    for op, values in calls.items():
        kernel = op.choose(values, 'auto')
        ours = milliseconds(op, kernel, values, compiled=False)
        theirs = milliseconds(op, op.reference, values, compiled=True)
        rows.append(dict(op=op.name, implementation=kernel.__name__, ms=ours, compiled_ms=theirs))
        rows[-1]['ratio'] = theirs / ours
        print(*rows[-1].values(), flush=True)
    write_csv([row | about for row in rows], args.out)


if __name__ == '__main__':
    main()
