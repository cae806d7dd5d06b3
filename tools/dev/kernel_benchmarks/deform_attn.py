"""Times deformable attention at the ViT-Adapter's shapes, side by side with its alternatives.

    python tools/dev/kernel_benchmarks/deform_attn.py
    python tools/dev/kernel_benchmarks/deform_attn.py --device cpu --smoke --out /some/folder

Every contender starts from values, offsets and logits, as the two linear layers give them: `ours`
with the glue fused in, `ours, two steps` from locations and weights made in PyTorch, grid sampling
(eager and compiled), and mmcv's CUDA operator, where it is installed, in fp32 and in fp16.
"""

import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ExtensionFileLoader
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timing import Run, command_line, measure_all, ready
from torch import Tensor

from ttt_kernels import deform_attn, deform_attn_fused

SHAPE = ('part', 'model', 'image', 'batch', 'queries', 'pixels', 'heads', 'dim')
# Heads and their channels, by the adapter's defaults for the three widths.
MODELS = {'tiny': (6, 32), 'small': (6, 64), 'base': (12, 32)}
# Images (height, width) and their number.
IMAGES = (((800, 1344), 2), ((800, 1344), 16), ((512, 512), 16))
POINTS = 4


class Shape(NamedTuple):
    part: str
    model: str
    image: tuple[int, int]
    batch: int
    heads: int
    dim: int

    def grid(self, stride: int) -> tuple[int, int]:
        return tuple(math.ceil(side / stride) for side in self.image)

    @property
    def values(self) -> list[tuple[int, int]]:
        """The levels that are sampled: the pyramid by the injector, the tokens by the extractor."""
        return [self.grid(s) for s in ((8, 16, 32) if self.part == 'injector' else (16,))]

    @property
    def queries(self) -> int:
        asking = (16,) if self.part == 'injector' else (8, 16, 32)
        return sum(math.prod(self.grid(s)) for s in asking)

    def row(self) -> dict[str, object]:
        pixels = sum(map(math.prod, self.values))
        image = f'{self.image[1]}x{self.image[0]}'
        values = (self.part, self.model, image, self.batch, self.queries, pixels, *self[-2:])
        return dict(zip(SHAPE, values, strict=True))


def shapes() -> list[Shape]:
    return [
        Shape(part, model, *image, *sizes)
        for image, (model, sizes), part in itertools.product(
            IMAGES, MODELS.items(), ('extractor', 'injector')
        )
    ]


SMOKE = [Shape(part, 'smoke', (64, 96), 1, 2, 16) for part in ('extractor', 'injector')]


# ---------------------------------------------------------------------------------- contenders


def inputs_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """value, offsets of some pixels, logits; the places of the queries are those of a grid."""
    levels, batch, queries = len(shape.values), shape.batch, shape.queries
    pixels = sum(map(math.prod, shape.values))
    options = {'device': device, 'dtype': dtype}
    points = (batch, queries, shape.heads, levels, POINTS)
    tensors = [
        torch.randn(batch, pixels, shape.heads, shape.dim, **options),
        2 * torch.randn(*points, 2, **options),
        torch.randn(*points, **options),
    ]
    return [x.requires_grad_() for x in tensors]


def centres_of(shape: Shape, device: torch.device) -> Tensor:
    """`(1, Q, L, 2)`: the middles of the query cells over the image."""
    asking = (16,) if shape.part == 'injector' else (8, 16, 32)
    found = []
    for height, width in map(shape.grid, asking):
        y = (torch.arange(height, device=device) + 0.5) / height
        x = (torch.arange(width, device=device) + 0.5) / width
        y, x = torch.meshgrid(y, x, indexing='ij')
        found.append(torch.stack((x, y), -1).flatten(0, 1))
    return torch.cat(found)[None, :, None].expand(1, -1, len(shape.values), 2).contiguous()


def glue(shape: Shape, centres: Tensor, offsets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Locations in fp32 and weights, as a module makes them."""
    sizes = torch.tensor(shape.values, device=offsets.device).flip(-1)
    locations = centres[:, :, None, :, None] + offsets.float() / sizes[:, None]
    return locations, logits.flatten(-2).softmax(-1).view(logits.shape)


def grid_sampling(shape: Shape, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """Level by level with `grid_sample`, the usual way without an operator of one's own."""
    batch, _, heads, dim = value.shape
    parts = value.split([math.prod(size) for size in shape.values], 1)
    sampled = []
    for level, (part, size) in enumerate(zip(parts, shape.values, strict=True)):
        maps = part.permute(0, 2, 3, 1).reshape(batch * heads, dim, *size)
        grid = (2 * locations[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
        sampled.append(F.grid_sample(maps, grid.to(maps.dtype), align_corners=False))
    weights = weights.permute(0, 2, 1, 3, 4).reshape(batch * heads, 1, -1, len(parts) * POINTS)
    out = (torch.cat(sampled, -1) * weights).sum(-1)
    return out.view(batch, heads * dim, -1).transpose(1, 2).contiguous()


def mmcv_operator(shape: Shape, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """mmcv's CUDA operator; it rounds the locations to the type of the values."""
    from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction

    sizes = torch.tensor(shape.values, device=value.device)
    starts = torch.cat((sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]))
    return MultiScaleDeformableAttnFunction.apply(value, sizes, starts, locations, weights, 64)


CONTENDERS: dict[str, tuple[torch.dtype, Callable[..., Tensor] | None]] = {
    'ours': (torch.bfloat16, None),
    'ours, two steps': (
        torch.bfloat16,
        lambda shape, value, locations, weights: deform_attn(
            value, shape.values, locations, weights
        ),
    ),
    'grid sampling': (torch.bfloat16, grid_sampling),
    'grid sampling, compiled': (torch.bfloat16, grid_sampling),
    'mmcv, fp16': (torch.float16, mmcv_operator),
    'mmcv, fp32': (torch.float32, mmcv_operator),
}


def build(name: str, shape: Shape, device: torch.device) -> Run:
    dtype, function = CONTENDERS[name]
    leaves = inputs_of(shape, device, dtype)
    centres = centres_of(shape, device)
    value, offsets, logits = leaves
    if function is None:
        return lambda: deform_attn_fused(value, shape.values, centres, offsets, logits), leaves

    def whole(value: Tensor, offsets: Tensor, logits: Tensor) -> Tensor:
        return function(shape, value, *glue(shape, centres, offsets, logits))

    if name.endswith('compiled'):
        torch.compiler.reset()
        whole = torch.compile(whole, dynamic=False)
    return lambda: whole(*leaves), leaves


def contenders(device: torch.device) -> list[str]:
    """Those that can run here: mmcv's only where it is compiled."""
    # Without mmcv its submodule can't be asked for; a stand-in of mmvttt's is no compiled one.
    found = importlib.util.find_spec('mmcv') and importlib.util.find_spec('mmcv._ext')
    compiled = found is not None and isinstance(found.loader, ExtensionFileLoader)
    return [
        name
        for name in CONTENDERS
        if not (name.startswith('mmcv') and not (compiled and device.type == 'cuda'))
        and not (name.endswith('compiled') and device.type != 'cuda')
    ]


def main() -> int:
    args = command_line(__doc__).parse_args()
    if (device := ready(args)) is None:
        return 1
    pairs = itertools.product(SMOKE if args.smoke else shapes(), contenders(device))
    cases = (
        ({**shape.row(), 'contender': name}, partial(build, name, shape, device))
        for shape, name in pairs
    )
    return measure_all('deform_attn', SHAPE, cases, args, device)


if __name__ == '__main__':
    sys.exit(main())
