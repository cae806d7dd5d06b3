"""Times the residual sums and norms of a block side by side with torch's, as autocast runs them.

    python tools/dev/kernel_benchmarks/residual_norm.py
    python tools/dev/kernel_benchmarks/residual_norm.py --device cpu --smoke --out /some/folder

x in fp32 or bf16, the branch in bf16: forward, and with backward.
"""

import itertools
import sys
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timing import Run, command_line, measure_all, ready
from torch import Tensor

from ttt_kernels import conv_norm, residual_norm


class Shape(NamedTuple):
    op: str
    stream: str
    batch: int
    height: int
    width: int
    channels: int


SHAPES = [
    Shape(op, stream, *size)
    for op, stream, size in itertools.product(
        ('residual_norm', 'conv_norm'),
        ('float32', 'bfloat16'),
        ((2, 50, 84, 384), (2, 50, 84, 320), (16, 50, 84, 384), (64, 80, 80, 192)),
    )
]
SMOKE = [Shape(op, 'float32', 2, 3, 5, 32) for op in ('residual_norm', 'conv_norm')]


def eager_sum(x: Tensor, branch: Tensor, gain: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    y = x + branch
    return y, F.layer_norm(y.float(), gain.shape, gain, offset, 1e-6).bfloat16()


def eager_conv(
    x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, offset: Tensor, *, hw: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    image = x.bfloat16().unflatten(1, hw).permute(0, 3, 1, 2)
    kernel = weight[:, None].bfloat16()
    out = F.conv2d(image, kernel, bias.bfloat16(), padding=1, groups=len(weight))
    return eager_sum(x, out.permute(0, 2, 3, 1).flatten(1, 2), gain, offset)


def build(name: str, shape: Shape, device: torch.device) -> Run:
    size = (shape.batch, shape.height * shape.width, shape.channels)
    x = torch.randn(size, device=device, dtype=getattr(torch, shape.stream))
    learned = [torch.randn(shape.channels, device=device) for _ in range(2)]
    options: dict[str, object] = {'dtype': torch.bfloat16} if name == 'ours' else {}
    if shape.op == 'conv_norm':
        weight, bias = torch.randn(2, shape.channels, 9, device=device)
        learned[:0] = [weight.view(-1, 3, 3), bias[:, 0].contiguous()]
        options['hw'] = (shape.height, shape.width)
        function = conv_norm if name == 'ours' else eager_conv
    else:
        learned[:0] = [torch.randn(size, device=device, dtype=torch.bfloat16)]
        function = residual_norm if name == 'ours' else eager_sum
    leaves = [t.detach().requires_grad_() for t in (x, *learned)]
    return lambda: function(*leaves, **options), leaves


def main() -> int:
    args = command_line(__doc__).parse_args()
    if (device := ready(args)) is None:
        return 1
    cases = (
        ({**shape._asdict(), 'contender': name}, partial(build, name, shape, device))
        for shape, name in itertools.product(SMOKE if args.smoke else SHAPES, ('ours', 'eager'))
    )
    return measure_all('residual_norm', Shape._fields, cases, args, device)


if __name__ == '__main__':
    sys.exit(main())
