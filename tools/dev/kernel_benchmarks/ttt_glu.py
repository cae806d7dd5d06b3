"""Times the inner steps side by side with their eager formulas, as they are and compiled.

    python tools/dev/kernel_benchmarks/ttt_glu.py
    python tools/dev/kernel_benchmarks/ttt_glu.py --op dwconv --model vit3-tiny
    python tools/dev/kernel_benchmarks/ttt_glu.py --device cpu --smoke --out /some/folder

In bf16, at the shapes of ViT³, of the stages of H-ViT³ and of T⁵: forward, and with backward.
"""

import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timing import Run, command_line, measure_all, ready
from torch import Tensor

from ttt_kernels import ttt_dwconv, ttt_glu, ttt_mlp

SHAPE = ('op', 'model', 'image', 'batch', 'height', 'width', 'heads', 'dim')
OPS = ('glu', 'dwconv', 'mlp')
# Images (height, width) and their number: the two of the targets first.
IMAGES = (
    ((1280, 1280), 8),
    ((800, 1333), 2),
    ((224, 224), 128),
    ((512, 512), 16),
    ((800, 1333), 16),
)
TARGETS = IMAGES[:2]
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
    # Past eight compilations of one function torch runs it as it is.
    torch.compiler.reset()
    return torch.compile(eager(shape), dynamic=False)


CONTENDERS = {'ours': ours, 'eager': eager, 'compiled': compiled}


def build(name: str, shape: Shape, device: torch.device) -> Run:
    leaves = inputs_of(shape, device, torch.bfloat16)
    function = CONTENDERS[name](shape)
    return lambda: function(*leaves), leaves


def cases(smoke: bool) -> list[tuple[str, Shape]]:
    """Contenders and shapes, the targets first; compiling, which takes seconds, for them alone."""
    if smoke:
        return [(name, shape) for name in ('ours', 'eager') for shape in SMOKE]
    targets = {(f'{image[1]}x{image[0]}', batch) for image, batch in TARGETS}
    # A stable sort: within a rank the order of `shapes` stays.
    found = [(name, s) for name, s in itertools.product(CONTENDERS, shapes())]
    found = [c for c in found if c[0] != 'compiled' or _is_target(c[1], targets)]
    return sorted(found, key=lambda c: (not _is_target(c[1], targets), c[0] == 'compiled'))


def _is_target(shape: Shape, targets: set[tuple[str, int]]) -> bool:
    return shape.model.startswith('vit3') and (shape.image, shape.batch) in targets


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument('--op', choices=OPS, help='one op only')
    parser.add_argument('--model', choices=MODELS | T5_MODELS, help='one model only')
    args = parser.parse_args()
    if (device := ready(args)) is None:
        return 1
    wanted = (
        ({**shape._asdict(), 'contender': name}, partial(build, name, shape, device))
        for name, shape in cases(args.smoke)
        if args.op in (None, shape.op) and args.model in (None, shape.model)
    )
    return measure_all('ttt_glu', SHAPE, wanted, args, device)


if __name__ == '__main__':
    sys.exit(main())
