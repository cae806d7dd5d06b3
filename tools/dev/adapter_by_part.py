"""Times a ViT-Adapter part by part, forward and forward + backward, and writes a CSV.

Each module runs alone, on the inputs that it has in the whole; of those that are alike, one is
timed and all are counted. `rest` is what the whole takes beyond them: additions, layouts of maps,
resizing, cold caches. On a CPU it is the time of the process with one thread, on a GPU the clock's;
the least of several.

example: python tools/dev/adapter_by_part.py docs/benchmarks/adapter_by_part_cpu.csv
"""

import argparse
import csv
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from mmvttt.analysis.benchmark import device_name
from mmvttt.analysis.models import find_model

# Names of a part's modules; what of them are parts of their own.
PARTS = {
    'patch embedding': (r'backbone\.patch_embed', None),
    'blocks of the backbone': (r'backbone\.blocks\.\d+', None),
    'spatial prior': (r'spatial_prior', None),
    'interactions: norms': (r'interactions\..*_norm', None),
    'injectors: linear layers': (r'.*injector\.attention\.\w+', None),
    'injectors: deform_attn_fused': (r'.*injector\.attention', r'.*injector\.attention\.\w+'),
    'extractors: linear layers': (r'.*extractors\.\d+\.attention\.\w+', None),
    'extractors: deform_attn_fused': (
        r'.*extractors\.\d+\.attention',
        r'.*extractors\.\d+\.attention\.\w+',
    ),
    'conv-FFN: linear layers': (r'.*\.ffn\.fc\d', None),
    'conv-FFN: convolution, GELU': (r'.*\.ffn', r'.*\.ffn\.fc\d'),
    'transposed convolution': (r'up', None),
    'norms of the outputs': (r'norms\.\d', None),
}


class Call:
    """A module with the arguments that it has in the whole."""

    def __init__(self, module: nn.Module, args: tuple) -> None:
        self.module = module
        # Only what has a gradient in the whole has one here: the image has none.
        self.args = [
            x.detach().requires_grad_(x.requires_grad) if _is_float(x) else x for x in args
        ]
        shapes = [tuple(x.shape) for x in self.args if isinstance(x, Tensor)]
        parameters = [tuple(p.shape) for p in module.parameters()]
        self.kind = (type(module), str(shapes), str(parameters))

    def run(self, backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            outs = self.module(*self.args)
        if backward:
            outs = [x for x in (outs if isinstance(outs, tuple) else (outs,)) if x is not None]
            leaves = [x for x in (*self.args, *self.module.parameters()) if _is_float(x)]
            leaves = [x for x in leaves if x.requires_grad]
            grads = [torch.ones_like(x) for x in outs]
            torch.autograd.grad(outs, leaves, grads, allow_unused=True)


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def calls_of(model: nn.Module, image: Tensor) -> dict[str, Call]:
    """What the model, and every module of a part, is called with at first, by its name."""
    patterns = ['', *(x for pair in PARTS.values() for x in pair if x)]
    found: dict[str, Call] = {}

    def keep(name: str) -> Callable:
        return lambda module, args: found.setdefault(name, Call(module, args)) and None

    handles = [
        module.register_forward_pre_hook(keep(name))
        for name, module in model.named_modules()
        if any(re.fullmatch(pattern, name) for pattern in patterns)
    ]
    model(image)
    for handle in handles:
        handle.remove()
    return found


def milliseconds(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        if device.type == 'cuda':
            torch.cuda.synchronize()
        now = time.perf_counter if device.type == 'cuda' else time.process_time
        begin = now()
        run()
        if device.type == 'cuda':
            torch.cuda.synchronize()
        times.append(now() - begin)
    return 1e3 * min(times)


def rows(model: nn.Module, image: Tensor, repeats: int) -> Iterator[dict]:
    """Milliseconds of the parts, of the rest and of the whole."""
    calls, known = calls_of(model, image), {}

    def both(pattern: str | None) -> tuple[int, list[float]]:
        matched = [c for n, c in calls.items() if pattern is not None and re.fullmatch(pattern, n)]
        for call in matched:
            if call.kind not in known:
                known[call.kind] = [
                    milliseconds(lambda c=call, b=b: c.run(b), image.device, repeats)
                    for b in (False, True)
                ]
        return len(matched), [sum(known[c.kind][i] for c in matched) for i in range(2)]

    _, whole = both('')
    rest = whole
    for part, (pattern, inside) in PARTS.items():
        count, times = both(pattern)
        _, taken = both(inside)
        times = [a - b for a, b in zip(times, taken, strict=True)]
        rest = [a - b for a, b in zip(rest, times, strict=True)]
        yield _row(part, count, times, whole)
    yield _row('rest', 1, rest, whole)
    yield _row('whole', 1, whole, whole)


def _row(part: str, count: int, times: list[float], whole: list[float]) -> dict:
    forward, backward = (f'{x:.1f}' for x in times)
    share = f'{100 * times[1] / whole[1]:.1f}'
    return dict(part=part, count=count, forward_ms=forward, both_ms=backward, share_percent=share)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('table', type=Path, help='the CSV to write')
    parser.add_argument('--model', default='maskrcnn_vittt_t_1x', help='a config with a ViTAdapter')
    parser.add_argument('--shape', type=int, nargs=2, default=(800, 1344))
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = find_model(args.model).model.backbone
    image = torch.randn(args.batch, 3, *args.shape, device=args.device)
    about = dict(
        model=args.model,
        images=f'{args.batch}x{args.shape[1]}x{args.shape[0]}',
        device=device_name(args.device),
        torch=torch.__version__,
    )
    args.table.parent.mkdir(parents=True, exist_ok=True)
    with args.table.open('w', newline='') as file:
        writer = None
        for row in rows(model.to(args.device).train(), image, args.repeats):
            writer = writer or csv.DictWriter(file, [*about, *row], lineterminator='\n')
            if not file.tell():
                writer.writeheader()
            writer.writerow(about | row)
            print(*row.values(), sep='\t', flush=True)


if __name__ == '__main__':
    main()
