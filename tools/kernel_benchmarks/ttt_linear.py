"""Times ttt_linear side by side with its eager form, flash-linear-attention and attention.

    python tools/kernel_benchmarks/ttt_linear.py         # docs/benchmarks/ttt_linear_<gpu>.*
    python tools/kernel_benchmarks/ttt_linear.py --tune  # kernels/ttt_linear/_plans.py
    python tools/kernel_benchmarks/ttt_linear.py --device cpu --smoke --out /some/folder

One layer's worth of work in bf16: Vittt's two scans with H heads of 64 channels, and for attention
one call over the same tokens and channels. flash-linear-attention (optional) gets the two scans as
2H heads of one direction and a constant step, where its function costs the same as ours.
"""

import argparse
import csv
import itertools
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ('gpu', 'torch', 'triton')
SHAPE = ('what', 'image', 'batch', 'size', 'tokens')
FIELDS = (*VERSIONS, *SHAPE, 'contender', 'pass', 'ms', 'peak_mib', 'note')
HEADS = {'T': 3, 'S': 6, 'B': 12}
DIM, CHUNK, SCANS = 64, 16, 2
SLOW = ('eager', 'compiled')


class Shape(NamedTuple):
    what: str  # 'layer' or 'sweep'
    image: str
    batch: int
    size: str
    tokens: int


LAYERS = [
    Shape('layer', image, batch, size, tokens)
    for image, batch, tokens in (
        ('224x224', 128, 14 * 14),
        ('512x512', 16, 32 * 32),
        ('1333x800', 2, 84 * 50),
        ('1333x800', 16, 84 * 50),
        ('1280x1280', 64, 80 * 80),
    )
    for size in HEADS
]
SWEEP = [Shape('sweep', '', 1, 'S', 1024 * 2**i) for i in range(7)]
SMOKE = [Shape('layer', '80x80', 1, 'T', 25), Shape('sweep', '', 1, 'S', 16)]

Run = tuple[Callable[[], Tensor], list[Tensor]]


# ---------------------------------------------------------------------------------- contenders


def tokens_of(shape: Shape, device: torch.device, scans: int = SCANS) -> list[Tensor]:
    size = (shape.batch, shape.tokens, scans, HEADS[shape.size], DIM)
    return [
        torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]


def parameters_of(shape: Shape, device: torch.device) -> list[Tensor]:
    """eta, w0, b0, ln_weight, ln_bias, token_scale; the step is constant, as fla needs it."""
    heads = (SCANS, HEADS[shape.size])
    values = [
        torch.full((shape.batch, shape.tokens, *heads), 0.5 / DIM, device=device),
        0.02 * torch.randn(*heads, DIM, DIM, device=device),
        torch.zeros(*heads, DIM, device=device),
        torch.ones(*heads, DIM, device=device),
        torch.zeros(*heads, DIM, device=device),
        (1 / torch.arange(1, CHUNK + 1, device=device)).repeat(SCANS, 1),
    ]
    return [x.requires_grad_() for x in values]


def ours(shape: Shape, device: torch.device) -> Run:
    from ttt_kernels import ttt_linear

    leaves = [*tokens_of(shape, device), *parameters_of(shape, device)]
    backend = 'triton' if device.type == 'cuda' else None
    return lambda: ttt_linear(*leaves, backend=backend), leaves


def dual_step(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, w: Tensor, c: Tensor, weight: Tensor,
    bias: Tensor, scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One mini-batch of the dual form, `(B, R, H, 16, d)`, as one would write it in PyTorch."""
    z = k @ w + c
    sigma = (z.float().var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    x = (z - z.mean(-1, keepdim=True)) / sigma
    p = weight * (weight * x + bias - (v - k))
    g = (p - p.mean(-1, keepdim=True) - x * (p * x).mean(-1, keepdim=True)) / sigma
    mixed = (scale[..., :, None] * step[..., None, :] * (q @ k.mT + 1)).tril()
    o = q + F.layer_norm((q @ w + c - mixed @ g).float(), (DIM,)) * weight + bias
    last = (scale[..., -1:] * step)[..., None]
    return o.to(q.dtype), w - (last * k).mT @ g, c - (last * g).sum(-2, keepdim=True)


def eager(shape: Shape, device: torch.device, step: Callable = dual_step) -> Run:
    leaves = [*tokens_of(shape, device), *parameters_of(shape, device)]

    def run() -> Tensor:
        q, k, v, eta, w, c, weight, bias, scale = leaves
        fill = -shape.tokens % CHUNK
        # The second scan reads backward, and the last mini-batch is filled up.
        chunks = []
        for x in (q, k, v, eta):
            x = torch.stack([x[:, :, 0], x[:, :, 1].flip(1)], 2).movedim(1, 3)
            x = F.pad(x, (0, 0) * (x.dim() - 4) + (0, fill))
            chunks.append(x.split(CHUNK, 3))
        w, c = w.expand(shape.batch, *w.shape), c[:, :, None].expand(shape.batch, -1, -1, 1, -1)
        weight, bias, scale = weight[:, :, None], bias[:, :, None], scale[:, None]
        outputs = []
        with torch.autocast(device.type, torch.bfloat16):
            for qi, ki, vi, ei in zip(*chunks, strict=True):
                o, w, c = step(qi, ki, vi, ei, w, c, weight, bias, scale)
                outputs.append(o)
        o = torch.cat(outputs, 3)[:, :, :, : shape.tokens].movedim(3, 1)
        return torch.stack([o[:, :, 0], o[:, :, 1].flip(1)], 2)

    return run, leaves


def compiled(shape: Shape, device: torch.device) -> Run:
    backend = 'inductor' if device.type == 'cuda' else 'eager'
    return eager(shape, device, torch.compile(dual_step, dynamic=True, backend=backend))


def fla(name: str) -> Callable[[Shape, torch.device], Run]:
    def contender(shape: Shape, device: torch.device) -> Run:
        import fla.ops.ttt

        function = getattr(fla.ops.ttt, name)
        q, k, v = (x.detach().flatten(2, 3).requires_grad_() for x in tokens_of(shape, device))
        heads = q.shape[2]
        w0 = torch.zeros(shape.batch, heads, DIM, DIM, device=device, requires_grad=True)
        b0 = torch.zeros(shape.batch, heads, 1, DIM, device=device, requires_grad=True)
        weight = torch.ones(heads, DIM, device=device, requires_grad=True)
        bias = torch.zeros(heads, DIM, device=device, requires_grad=True)
        size = (shape.batch, shape.tokens, heads, 1)
        eta = torch.full(size, 0.5 / DIM, device=device, dtype=q.dtype, requires_grad=True)
        options = {'chunk_size': CHUNK, 'initial_state': w0, 'initial_state_bias': b0}
        leaves = [q, k, v, weight, bias, eta, w0, b0]
        return lambda: function(q, k, v, weight, bias, eta, **options)[0], leaves

    return contender


def attention(backend: SDPBackend | None) -> Callable[[Shape, torch.device], Run]:
    def contender(shape: Shape, device: torch.device) -> Run:
        leaves = tokens_of(shape, device, scans=1)
        only = sdpa_kernel(backend) if device.type == 'cuda' else nullcontext()

        def run() -> Tensor:
            q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in leaves)
            with only:
                return F.scaled_dot_product_attention(q, k, v)

        return run, leaves

    return contender


CONTENDERS = {
    'ours': ours,
    'fla chunk': fla('chunk_ttt_linear'),
    'fla fused': fla('fused_chunk_ttt_linear'),
    'SDPA flash': attention(SDPBackend.FLASH_ATTENTION),
    'SDPA cuDNN': attention(SDPBackend.CUDNN_ATTENTION),
    'eager': eager,
    'compiled': compiled,
}


# --------------------------------------------------------------------------------- measurement


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """Median time of a call; few calls where one takes long."""
    if device.type != 'cuda':
        function()
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    function()
    first = once()
    if first > 50:
        return statistics.median([first, once()])
    # Clears the L2 cache between calls.
    return triton.testing.do_bench(function, warmup=10, rep=60, return_mode='median')


def measure(name: str, shape: Shape, device: torch.device) -> Iterator[dict[str, object]]:
    """A row for the forward pass and one for forward and backward."""
    for way in ('fwd', 'fwd+bwd'):
        row = {'contender': name, 'pass': way, 'ms': '', 'peak_mib': '', 'note': ''}
        try:
            run, leaves = CONTENDERS[name](shape, device)
            grad = torch.randn_like(run())

            def call(run=run, leaves=leaves, grad=grad, way=way) -> None:
                with torch.set_grad_enabled(way != 'fwd'):
                    output = run()
                if way != 'fwd':
                    torch.autograd.grad(output, leaves, grad, allow_unused=True)

            call()
            if device.type == 'cuda':
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                call()
                peak = torch.cuda.max_memory_allocated(device) - before
                row['peak_mib'] = round(peak / 2**20, 1)
            row['ms'] = round(milliseconds(call, device), 4)
        except Exception as error:  # one contender's failure is a finding, not the end
            row['note'] = f'{type(error).__name__}: {error}'.split('\n')[0][:160]
        run = leaves = grad = call = None
        if device.type == 'cuda':
            torch.cuda.empty_cache()
        yield row


def run_all(
    shapes: list[Shape], device: torch.device, seconds: float
) -> Iterator[dict[str, object]]:
    """Every contender at every shape; the slow ones last, as far as the time goes."""
    end = time.monotonic() + seconds
    versions = dict(
        zip(VERSIONS, (device_name(device), torch.__version__, triton.__version__), strict=True)
    )
    for slow in (False, True):
        for shape, name in itertools.product(shapes, CONTENDERS):
            if (name in SLOW) != slow or (shape.what == 'sweep' and slow):
                continue
            if time.monotonic() > end:
                yield {**versions, **shape._asdict(), 'contender': name, 'note': 'no time left'}
                continue
            for row in measure(name, shape, device):
                yield {**versions, **shape._asdict(), **row}


def device_name(device: torch.device) -> str:
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    return f'CPU smoke ({platform.machine()})'


# -------------------------------------------------------------------------------------- results


def slope(rows: list[dict[str, object]], way: str, least: int = 4096) -> float | None:
    """Exponent of our time in the number of tokens, from `least` tokens on."""
    points = [
        (math.log(row['tokens']), math.log(row['ms']))
        for row in rows
        if row.get('ms') and row['what'] == 'sweep' and row['tokens'] >= least
        if row['contender'] == 'ours' and row['pass'] == way
    ]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def summary(rows: list[dict[str, object]]) -> list[str]:
    """For every shape, how many times as long as ours the others take."""
    lines = []
    times: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if row.get('ms'):
            key = tuple(row[field] for field in (*SHAPE, 'pass'))
            times.setdefault(key, {})[row['contender']] = row['ms']
    for key, by_name in times.items():
        mine = by_name.pop('ours', None)
        if mine:
            ratios = (f'{name} {ms / mine:.2f}x' for name, ms in by_name.items())
            lines.append(f'{" ".join(map(str, key))}: ours {mine} ms; ' + ', '.join(ratios))
    for way in ('fwd', 'fwd+bwd'):
        if (exponent := slope(rows, way)) is not None:
            lines.append(f'{way}: time grows as T^{exponent:.3f} from 4k tokens on')
    return lines


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """Time over tokens of the sweep, and times at the shapes of real images."""
    try:
        import matplotlib as mpl
    except ImportError:
        print('no plot: matplotlib is not installed')
        return
    mpl.use('Agg')
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(15, 10), constrained_layout=True)
    for (left, right), way in zip(axes, ('fwd', 'fwd+bwd'), strict=True):
        layers = list(dict.fromkeys(
            (r['image'], r['batch'], r['size']) for r in rows if r['what'] == 'layer'
        ))  # fmt: skip
        for i, name in enumerate(CONTENDERS):
            mine = [r for r in rows if r.get('ms') and (r['contender'], r['pass']) == (name, way)]
            sweep = [(r['tokens'], r['ms']) for r in mine if r['what'] == 'sweep']
            if sweep:
                left.loglog(*zip(*sweep, strict=True), marker='o', label=name)
            bars = {(r['image'], r['batch'], r['size']): r['ms'] for r in mine}
            places = [(j + 0.11 * i, bars[key]) for j, key in enumerate(layers) if key in bars]
            if places:
                right.bar(*zip(*places, strict=True), width=0.11, label=name)
        left.set(xlabel='tokens, B = 1, S', ylabel='ms', title=f'{way}: growth')
        right.set(ylabel='ms', yscale='log', title=f'{way}: one layer')
        names = [f'{image} B={batch} {size}' for image, batch, size in layers]
        right.set_xticks(range(len(layers)), names, rotation=60, ha='right', fontsize=7)
        for axis in (left, right):
            axis.legend(fontsize=7)
            axis.grid(alpha=0.3)
    versions = rows[0]
    figure.suptitle(f'{versions["gpu"]}, torch {versions["torch"]}, Triton {versions["triton"]}')
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --------------------------------------------------------------------------------------- tuning


def tune(device: torch.device) -> list[str]:
    """Rows of `_plans.PLANS` for this GPU: the faster path by number of scans and of tokens."""
    from ttt_kernels.ttt_linear import _plans, kernel
    from ttt_kernels.ttt_linear.reference import Inputs

    properties = torch.cuda.get_device_properties(device)
    name, processors = properties.name, properties.multi_processor_count
    rows = []
    for tokens in (4096, 1024, 256):
        for per_sm in (0.25, 1.0, 2.0, 3.0, 6.0):
            images = max(1, round(per_sm * processors / (SCANS * HEADS['T'])))
            shape = Shape('tune', '', images, 'T', tokens)
            inputs = Inputs(*(x.detach() for x in ours(shape, device)[1]))
            found = []
            for apart in (False, True):
                _plans.PLANS = (_plans.Plan('', 0, math.inf, 0, apart),)
                call = lambda: kernel.forward(inputs, 'fb', 16, 1e-6)  # noqa: B023, E731
                found.append((milliseconds(call, device), apart))
            print(tokens, per_sm, found, flush=True)
            # A row holds from its own number of scans up to half-way to the next.
            below = 1.5 * per_sm if per_sm < 6 else math.inf
            limit = "float('inf')" if below == math.inf else repr(below)
            rows.append(f'    Plan({name!r}, {DIM}, {limit}, {tokens}, apart={min(found)[1]}),')
    return rows


def write_plans(rows: list[str], path: Path) -> None:
    """Puts measured rows in front of the others, in place of those of the same GPU."""
    text = path.read_text()
    gpu = re.match(r'\s*Plan\((.*?), ', rows[0])[1]
    kept = [line for line in text.splitlines() if not line.startswith(f'    Plan({gpu}, ')]
    at = kept.index('PLANS = (') + 1
    path.write_text('\n'.join(kept[:at] + rows + kept[at:]) + '\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'benchmarks')
    parser.add_argument('--seconds', type=float, default=270, help='start nothing new after that')
    parser.add_argument('--smoke', action='store_true', help='tiny shapes: does it run at all?')
    parser.add_argument('--tune', action='store_true', help='measure and rewrite the plans')
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == 'cuda' and not torch.cuda.is_available():
        print('torch sees no CUDA GPU; --device cpu --smoke --out FOLDER tries the script')
        return 1
    if device.type != 'cuda' and (not args.smoke or args.out == parser.get_default('out')):
        print('times of a CPU are no benchmark: --smoke and --out, outside docs/, go with it')
        return 1
    torch.manual_seed(0)
    if args.tune:
        write_plans(tune(device), ROOT / 'kernels' / 'ttt_linear' / '_plans.py')
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    short = re.sub(r'[^a-z0-9]+', '_', device_name(device).lower()).strip('_')
    path = args.out / f'ttt_linear_{short.removeprefix("nvidia_")}.csv'
    rows = []
    # Line by line: what was measured is kept, whatever happens next.
    with path.open('w', newline='', buffering=1) as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for row in run_all(SMOKE if args.smoke else LAYERS + SWEEP, device, args.seconds):
            rows.append(row)
            writer.writerow(row)
            print(*(row.get(f, '') for f in FIELDS[len(VERSIONS) :]), sep='\t', flush=True)
    plot(rows, path.with_suffix('.png'))
    print(*summary(rows), f'wrote {path}', sep='\n')
    return int(not any(row['contender'] == 'ours' and row.get('ms') for row in rows))


if __name__ == '__main__':
    sys.exit(main())
