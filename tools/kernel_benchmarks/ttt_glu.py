"""Times the inner steps side by side with their eager formulas, as they are and compiled.

    python tools/kernel_benchmarks/ttt_glu.py           # writes docs/benchmarks/ttt_glu_<gpu>.csv
    python tools/kernel_benchmarks/ttt_glu.py --op dwconv --model vit3-tiny
    python tools/kernel_benchmarks/ttt_glu.py --device cpu --smoke --out /some/folder

In bf16, at the shapes of ViT³, of the stages of H-ViT³ and of T⁵: forward, and with backward.
"""

import argparse
import csv
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from ttt_linear import device_name, milliseconds

from ttt_kernels import ttt_dwconv, ttt_glu, ttt_mlp

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ('op', 'model', 'image', 'batch', 'height', 'width', 'heads', 'dim')
FIELDS = ('gpu', 'torch', 'triton', *SHAPE, 'contender', 'pass', 'ms', 'peak_mib', 'note')
OPS = ('glu', 'dwconv', 'mlp')
# Images (height, width) and their number.
IMAGES = (
    ((224, 224), 128),
    ((512, 512), 16),
    ((800, 1333), 2),
    ((800, 1333), 16),
    ((1280, 1280), 8),
)
# Gated heads and channels a head, by the stride of the map. H-ViT³-S has the maps of T.
MODELS = {
    'vit3-tiny': {16: (6, 32)},
    'vit3-small': {16: (6, 64)},
    'vit3-base': {16: (12, 64)},
    'h-vit3-tiny': {4: (2, 32), 8: (4, 32), 16: (10, 32), 32: (16, 32)},
    'h-vit3-base': {4: (3, 32), 8: (6, 32), 16: (14, 32), 32: (20, 32)},
}
# T⁵'s, which have ttt_mlp with three weights in all heads.
T5_MODELS = {'t5-tiny': {16: (3, 64)}, 't5-small': {16: (6, 64)}, 't5-base': {16: (12, 64)}}
SCALE = 1 / 3


class Shape(NamedTuple):
    op: str  # 'glu', 'dwconv', which has one head, or 'mlp'
    model: str
    image: str
    batch: int
    height: int
    width: int
    heads: int
    dim: int


def shapes() -> list[Shape]:
    """Every stage of every model at every image size."""
    return [
        Shape(op, model, f'{image[1]}x{image[0]}', batch, *hw, 1 if op == 'dwconv' else heads, dim)
        for (model, maps), (image, batch) in itertools.product((MODELS | T5_MODELS).items(), IMAGES)
        for stride, (heads, dim) in maps.items()
        for hw in [[math.ceil(side / stride) for side in image]]
        for op in (('mlp',) if model in T5_MODELS else ('glu', 'dwconv'))
    ]


SMOKE = [Shape(op, 'smoke', '80x112', 2, 5, 7, 1 if op == 'dwconv' else 2, 32) for op in OPS]


# ---------------------------------------------------------------------------------- contenders


def eager_glu(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The gated inner step as one would write it, in the dtype of q; `(B, N, H, d)`."""
    tokens = q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z1, z2 = k @ w1.to(k.dtype), k @ w2.to(k.dtype)
    sigma = torch.sigmoid(z2)
    errors = (v * z2 * sigma, v * z1 * sigma * (1 + z2 * (1 - sigma)))
    stepped = []
    for w, e in zip((w1, w2), errors, strict=True):
        g = (k.mT @ e).float() * (-SCALE / tokens)
        stepped.append((w - g / (g.norm(dim=-2, keepdim=True) + 1)).to(q.dtype))
    return ((q @ stepped[0]) * F.silu(q @ stepped[1])).transpose(1, 2)


def eager_dwconv(q: Tensor, k: Tensor, v: Tensor, w3: Tensor, hw: tuple[int, int]) -> Tensor:
    """The depth-wise inner step as one would write it; `(B, h·w, d)`."""
    batch, tokens, dim = q.shape
    h, w = hw
    q, k, v = (x.mT.unflatten(-1, hw) for x in (q, k, v))
    near = F.pad(k, (1, 1, 1, 1))
    taps = [
        (near[:, :, i : i + h, j : j + w] * v).float().sum((-2, -1))
        for i in range(3)
        for j in range(3)
    ]
    g = torch.stack(taps, dim=-1) * (-SCALE / tokens)
    stepped = w3 - (g / (g.norm(dim=-1, keepdim=True) + 1)).unflatten(-1, (3, 3))
    kernels = stepped.to(q.dtype).reshape(batch * dim, 1, 3, 3)
    o = F.conv2d(q.reshape(1, batch * dim, h, w), kernels, padding=1, groups=batch * dim)
    return o.view(batch, dim, tokens).mT


def eager_mlp(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """The SwiGLU inner step as one would write it, in the dtype of q; `(B, N, H, d)`."""
    tokens, dim = q.shape[1], q.shape[-1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z1, z2 = k @ w1.to(k.dtype), k @ w2.to(k.dtype)
    sigma = torch.sigmoid(z1)
    a = z1 * sigma
    d = v @ w3.to(k.dtype).mT
    sums = (
        k.mT @ (d * z2 * sigma * (1 + z1 * (1 - sigma))),
        k.mT @ (d * a),
        (a * z2).mT @ v,
    )
    stepped = [
        (w + g.float() * (dim**-0.5 / tokens)).to(q.dtype)
        for w, g in zip((w1, w2, w3), sums, strict=True)
    ]
    return ((F.silu(q @ stepped[0]) * (q @ stepped[1])) @ stepped[2]).transpose(1, 2)


def inputs_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Views of one packed projection, as the mixer makes them, and weights of N(0, 0.02)."""
    heads, dim = shape.heads, shape.dim
    tokens = shape.height * shape.width
    # The projection also holds the three tensors of the other op.
    packed = torch.randn(shape.batch, tokens, 3 * dim * (heads + 1), device=device, dtype=dtype)
    packed = packed[..., : 3 * dim * heads]
    if shape.op != 'dwconv':
        tensors = [x.unflatten(-1, (heads, dim)) for x in packed.chunk(3, -1)]
        sizes = [(heads, dim, dim)] * (2 if shape.op == 'glu' else 3)
    else:
        tensors, sizes = list(packed.chunk(3, -1)), [(dim, 3, 3)]
    tensors += [0.02 * torch.randn(size, device=device) for size in sizes]
    return [x.requires_grad_() for x in tensors]


def ours(shape: Shape) -> Callable[..., Tensor]:
    if shape.op == 'glu':
        return ttt_glu
    if shape.op == 'mlp':
        return lambda *tensors: ttt_mlp(*tensors, scale=shape.dim**-0.5)
    return lambda *tensors: ttt_dwconv(*tensors, hw=(shape.height, shape.width))


def eager(shape: Shape) -> Callable[..., Tensor]:
    if shape.op == 'glu':
        return eager_glu
    if shape.op == 'mlp':
        return eager_mlp
    return lambda *tensors: eager_dwconv(*tensors, (shape.height, shape.width))


def compiled(shape: Shape) -> Callable[..., Tensor]:
    torch.compiler.reset()
    return torch.compile(eager(shape), dynamic=False)


CONTENDERS = {'ours': ours, 'eager': eager, 'compiled': compiled}


# --------------------------------------------------------------------------------- measurement


def measure(name: str, shape: Shape, device: torch.device) -> Iterator[dict[str, object]]:
    """A row for the forward pass and one for forward and backward."""
    for way in ('fwd', 'fwd+bwd'):
        row = {'contender': name, 'pass': way, 'ms': '', 'peak_mib': '', 'note': ''}
        try:
            leaves = inputs_of(shape, device, torch.bfloat16)
            run = CONTENDERS[name](shape)
            grad = torch.randn_like(run(*leaves))

            def call(run=run, leaves=leaves, grad=grad, way=way) -> None:
                with torch.set_grad_enabled(way != 'fwd'):
                    output = run(*leaves)
                if way != 'fwd':
                    torch.autograd.grad(output, leaves, grad)

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'benchmarks')
    parser.add_argument('--seconds', type=float, default=600, help='start nothing new after that')
    parser.add_argument('--smoke', action='store_true', help='tiny shapes: does it run at all?')
    parser.add_argument('--op', choices=OPS, help='one op only')
    parser.add_argument('--model', choices=MODELS | T5_MODELS, help='one model only')
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == 'cuda' and not torch.cuda.is_available():
        print('torch sees no CUDA GPU; --device cpu --smoke --out FOLDER tries the script')
        return 1
    if device.type != 'cuda' and (not args.smoke or args.out == parser.get_default('out')):
        print('times of a CPU are no benchmark: --smoke and --out, outside docs/, go with it')
        return 1
    torch.manual_seed(0)
    end = time.monotonic() + args.seconds
    name = device_name(device)
    about = {'gpu': name, 'torch': torch.__version__, 'triton': triton.__version__}
    rows = []
    # What takes longest to compile comes last.
    for contender, shape in itertools.product(CONTENDERS, SMOKE if args.smoke else shapes()):
        if args.op not in (None, shape.op) or args.model not in (None, shape.model):
            continue
        if args.smoke and contender == 'compiled':
            continue
        found = [{'contender': contender, 'pass': 'fwd', 'note': 'no time left'}]
        for row in found if time.monotonic() > end else measure(contender, shape, device):
            rows.append({**about, **shape._asdict(), **row})
            print(*(rows[-1].get(field, '') for field in FIELDS[3:]), sep='\t', flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    short = re.sub(r'[^a-z0-9]+', '_', name.lower().removeprefix('nvidia ')).strip('_')
    path = args.out / f'ttt_glu_{short}.csv'
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    print(f'wrote {path}')
    return int(not any(row['contender'] == 'ours' and row.get('ms') for row in rows))


if __name__ == '__main__':
    sys.exit(main())
