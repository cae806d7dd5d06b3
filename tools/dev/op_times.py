"""Times a model's ops against torch.compile of their references, at the model's shapes, in bf16.

    python tools/dev/op_times.py vittt_small_patch16_224 128 224 224 --out op_times.csv

An op earns its place from a ratio of 1.15 on. A model is timm's, ours, or a config's backbone.
"""

import argparse

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from mmvttt.analysis.benchmark import machine
from mmvttt.analysis.tables import write_csv
from mmvttt.by_name import find_model
from mmvttt.cli import add_device
from ttt_kernels._op import OPS, Op


class FirstCalls(TorchDispatchMode):
    """Keeps the arguments of each op's first call in `calls`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for op in (op for op in OPS.values() if op.registered is func):
            self.calls.setdefault(op, args[: len(op.names)])
        return func(*args, **(kwargs or {}))


def milliseconds(op: Op, module: object, args: tuple, compiled: bool) -> float:
    """Median time of an implementation's forward and backward pass."""

    def run(*args):
        out = op.run(module, args, True)
        kept = out[op.results :] + out[:1] * op.saves_output
        grads = [torch.ones_like(x) for x in out[: op.results]]
        return op.run_backward(module, grads, args, kept, [True] * len(op.tensors))

    step = torch.compile(run, dynamic=False) if compiled else run
    timer = Timer('step(*args)', globals=locals(), num_threads=torch.get_num_threads())
    return 1000 * timer.blocked_autorange(min_run_time=1).median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('model')
    parser.add_argument('shape', nargs=3, type=int, metavar=('BATCH', 'HEIGHT', 'WIDTH'))
    parser.add_argument('--out', default='op_times.csv')
    add_device(parser)
    args = parser.parse_args()
    model = find_model(args.model).model
    model = getattr(model, 'backbone', model).to(args.device).eval()
    images = torch.randn(args.shape[0], 3, *args.shape[1:], device=args.device)
    rows, record = [], FirstCalls()
    record.calls = {}
    torch.set_grad_enabled(False)
    with torch.autocast(args.device, torch.bfloat16), record:
        model(images)
    for op, values in record.calls.items():
        kernel = op.choose(values, 'auto')
        ours = milliseconds(op, kernel, values, compiled=False)
        theirs = milliseconds(op, op.reference, values, compiled=True)
        row = dict(op=op.name, implementation=kernel.__name__, ms=ours, compiled_ms=theirs)
        rows.append(row | dict(ratio=theirs / ours, model=args.model, shape=args.shape))
        print(*rows[-1].values())
    write_csv([row | machine(args.device) for row in rows], args.out)


if __name__ == '__main__':
    main()
