"""Times ttt_linear side by side with its eager form, flash-linear-attention and attention.

    python tools/dev/kernel_benchmarks/ttt_linear.py         # docs/benchmarks/ttt_linear_<gpu>.*
    python tools/dev/kernel_benchmarks/ttt_linear.py --output   # in the scan, or apart from it?
    python tools/dev/kernel_benchmarks/ttt_linear.py --device cpu --smoke --out /some/folder

One layer's worth of work in bf16: Vittt's two scans with H heads of 64 channels, and for attention
one call over the same tokens and channels. flash-linear-attention (optional) gets the two scans as
2H heads of one direction and a constant step, where its function costs the same as ours.
"""

import functools
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from timing import MEASURED, Run, Table, command_line, measure, milliseconds, path_for, ready
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[3]
SHAPE = ('what', 'image', 'batch', 'size', 'tokens')
HEADS = {'T': 3, 'S': 6, 'B': 12}
DIM, CHUNK, SCANS = 64, 16, 2


class Shape(NamedTuple):
    what: str  # 'layer' or 'sweep'
    image: str
    batch: int
    size: str
    tokens: int


IMAGES = {
    '1280x1280': 80 * 80,
    '1333x800': 84 * 50,
    '224x224': 14 * 14,
    '512x512': 32 * 32,
}
# The shapes that the design aims at come first; the others as time allows.
TARGETS = [
    Shape('layer', image, batch, size, IMAGES[image])
    for image, batch, size in (
        ('1280x1280', 64, 'T'),
        ('1333x800', 2, 'S'),
        ('224x224', 128, 'T'),
        ('512x512', 16, 'S'),
        ('1333x800', 16, 'S'),
    )
]
OTHERS = [
    shape._replace(size=size) for shape in TARGETS for size in HEADS if shape.size != size
] + [Shape('sweep', '', 1, 'S', 1024 * 2**i) for i in range(7)]
SMOKE = [Shape('layer', '80x80', 1, 'T', 25), Shape('sweep', '', 1, 'S', 16)]


# ---------------------------------------------------------------------------------- contenders


def tokens_of(shape: Shape, device: torch.device, scans: int = SCANS) -> list[Tensor]:
    size = (shape.batch, shape.tokens, scans, HEADS[shape.size], DIM)
    return [
        torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]


def parameters_of(shape: Shape, device: torch.device, size: int = CHUNK) -> list[Tensor]:
    """eta, w0, b0, ln_weight, ln_bias, token_scale; the step is constant, as fla needs it."""
    heads = (SCANS, HEADS[shape.size])
    values = [
        torch.full((shape.batch, shape.tokens, *heads), 0.5 / DIM, device=device),
        0.02 * torch.randn(*heads, DIM, DIM, device=device),
        torch.zeros(*heads, DIM, device=device),
        torch.ones(*heads, DIM, device=device),
        torch.zeros(*heads, DIM, device=device),
        (1 / torch.arange(1, size + 1, device=device)).repeat(SCANS, 1),
    ]
    return [x.requires_grad_() for x in values]


def ours(shape: Shape, device: torch.device, size: int = CHUNK) -> Run:
    from ttt_kernels import ttt_linear

    leaves = [*tokens_of(shape, device), *parameters_of(shape, device, size)]
    backend = 'triton' if device.type == 'cuda' else None
    return lambda: ttt_linear(*leaves, mini_batch_size=size, backend=backend), leaves


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
    # Past eight compilations of one function torch runs it as it is.
    torch.compiler.reset()
    backend = 'inductor' if device.type == 'cuda' else 'eager'
    return eager(shape, device, torch.compile(dual_step, dynamic=True, backend=backend))


def fla(name: str) -> Callable[[Shape, torch.device], Run]:
    def contender(shape: Shape, device: torch.device) -> Run:
        import fla.ops.ttt

        # Its kernels multiply tokens with LayerNorm's parameters and the step: one dtype for all.
        like = {'device': device, 'dtype': torch.bfloat16, 'requires_grad': True}
        function = getattr(fla.ops.ttt, name)
        q, k, v = (x.detach().flatten(2, 3).requires_grad_() for x in tokens_of(shape, device))
        heads = q.shape[2]
        w0 = torch.zeros(shape.batch, heads, DIM, DIM, device=device, requires_grad=True)
        b0 = torch.zeros(shape.batch, heads, 1, DIM, device=device, requires_grad=True)
        weight, bias = torch.ones(heads, DIM, **like), torch.zeros(heads, DIM, **like)
        eta = torch.full((shape.batch, shape.tokens, heads, 1), 0.5 / DIM, **like)
        options = {'chunk_size': CHUNK, 'initial_state': w0, 'initial_state_bias': b0}
        leaves = [q, k, v, weight, bias, eta, w0, b0]
        return lambda: function(q, k, v, weight, bias, eta, **options)[0], leaves

    return contender


def attention(backend: SDPBackend) -> Callable[[Shape, torch.device], Run]:
    def contender(shape: Shape, device: torch.device) -> Run:
        leaves = tokens_of(shape, device, scans=1)

        def run() -> Tensor:
            q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in leaves)
            # A new one for each call: it can be entered once.
            with sdpa_kernel(backend) if device.type == 'cuda' else nullcontext():
                return F.scaled_dot_product_attention(q, k, v)

        return run, leaves

    return contender


CONTENDERS = {
    'ours': ours,
    **{f'ours, b {b}': functools.partial(ours, size=b) for b in (4, 64)},
    'fla chunk': fla('chunk_ttt_linear'),
    'fla fused': fla('fused_chunk_ttt_linear'),
    'SDPA flash': attention(SDPBackend.FLASH_ATTENTION),
    'SDPA cuDNN': attention(SDPBackend.CUDNN_ATTENTION),
    'eager': eager,
    'compiled': compiled,
}


# --------------------------------------------------------------------------------- measurement


FAST = ('ours', 'SDPA flash', 'SDPA cuDNN')
FLA = ('fla chunk', 'fla fused')
SIZES = tuple(name for name in CONTENDERS if name.startswith('ours, b'))
SLOW = ('eager', 'compiled')


def rows_of(
    shapes: list[Shape], names: tuple[str, ...], device: torch.device, end: float, late: str
) -> Iterator[dict[str, object]]:
    """Every contender at every shape; `late` is the note of those that come after the end."""
    for shape in shapes:
        for name in names:
            row = {**shape._asdict(), 'contender': name}
            if time.monotonic() > end:
                yield {**row, 'note': late}
                continue
            for found in measure(lambda n=name, s=shape: CONTENDERS[n](s, device), device):
                yield {**row, **found}


def run_all(
    smoke: bool, device: torch.device, seconds: float, fla_seconds: float
) -> Iterator[dict[str, object]]:
    """Targets first; what compiles for long has a budget of its own or comes last."""
    end = time.monotonic() + seconds
    targets, others = (SMOKE[:1], SMOKE[1:]) if smoke else (TARGETS, OTHERS)
    yield from rows_of(targets, FAST, device, end, 'no time left')
    if importlib.util.find_spec('fla'):
        fla_end = min(end, time.monotonic() + fla_seconds)
        yield from rows_of(targets, FLA, device, fla_end, f'no time left of {fla_seconds:.0f} s')
    else:
        note = 'not installed: pip install flash-linear-attention'
        yield from rows_of(targets, FLA, device, -math.inf, note)
    yield from rows_of(others, FAST, device, end, 'no time left')
    yield from rows_of(targets, SIZES, device, end, 'no time left')
    yield from rows_of(targets, SLOW, device, end, 'no time left')


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
        names = [n for n in CONTENDERS if any(r['contender'] == n and r.get('ms') for r in rows)]
        width = 0.8 / max(len(names), 1)
        for i, name in enumerate(names):
            mine = [r for r in rows if r.get('ms') and (r['contender'], r['pass']) == (name, way)]
            sweep = [(r['tokens'], r['ms']) for r in mine if r['what'] == 'sweep']
            if sweep:
                left.loglog(*zip(*sweep, strict=True), marker='o', label=name)
            bars = {(r['image'], r['batch'], r['size']): r['ms'] for r in mine}
            shift = (i - (len(names) - 1) / 2) * width
            places = [(j + shift, bars[key]) for j, key in enumerate(layers) if key in bars]
            if places:
                right.bar(*zip(*places, strict=True), width=width, label=name)
        left.set(xlabel='tokens, B = 1, S', ylabel='ms', title=f'{way}: growth')
        right.set(ylabel='ms', yscale='log', title=f'{way}: one layer')
        labels = [f'{image} B={batch} {size}' for image, batch, size in layers]
        right.set_xticks(range(len(layers)), labels, rotation=60, ha='right', fontsize=7)
        for axis in (left, right):
            axis.legend(fontsize=7)
            axis.grid(alpha=0.3)
    about = rows[0]
    figure.suptitle(f'{about["gpu"]}, torch {about["torch"]}, Triton {about["triton"]}')
    figure.savefig(path, dpi=110)
    plt.close(figure)


def compare_outputs(device: torch.device, smoke: bool) -> None:
    """Prints the times behind `kernel.output_apart`, by number of tokens and of scans."""
    from ttt_kernels.ttt_linear import kernel
    from ttt_kernels.ttt_linear.definition import Inputs

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    for tokens in (64,) if smoke else (4096, 1024, 256):
        for per_sm in (0.5, 1.0) if smoke else (0.5, 1.0, 1.5, 2.0, 3.0):
            images = max(1, round(per_sm * processors / (SCANS * HEADS['T'])))
            shape = Shape('output', '', images, 'T', tokens)
            inputs = Inputs(*(x.detach() for x in ours(shape, device)[1]))
            call = functools.partial(kernel.forward, inputs, 'fb', CHUNK, 1e-6)
            found = []
            for name, apart in (('in the scan', False), ('apart', True)):
                with patch.object(kernel, 'output_apart', lambda *_, apart=apart: apart):
                    found.append(f'{name} {milliseconds(call, device)[0]:.4f} ms')
            print(f'T {tokens}, {per_sm} scans a multiprocessor: {", ".join(found)}', flush=True)


def main() -> int:
    parser = command_line(__doc__, seconds=300)
    parser.add_argument('--fla-seconds', type=float, default=120, help="fla's part of them")
    parser.add_argument(
        '--output', action='store_true', help='time the output in the scan and apart, no more'
    )
    args = parser.parse_args()
    if (device := ready(args)) is None:
        return 1
    if args.output:
        compare_outputs(device, args.smoke)
        return 0
    with Table(path_for(args.out, 'ttt_linear', device), (*SHAPE, *MEASURED), device) as table:
        for row in run_all(args.smoke, device, args.seconds, args.fla_seconds):
            table.add(row)
    plot(table.rows, table.path.with_suffix('.png'))
    print(*summary(table.rows), sep='\n')
    return table.status()


if __name__ == '__main__':
    sys.exit(main())
