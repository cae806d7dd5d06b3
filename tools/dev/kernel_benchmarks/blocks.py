"""Times the fused parts of blocks side by side with torch's operations, as autocast runs them.

    python tools/dev/kernel_benchmarks/blocks.py
    python tools/dev/kernel_benchmarks/blocks.py --device cpu --smoke --out /some/folder

residual_norm and conv_norm with x in fp32 and bf16, the others in bf16: forward, and with
backward.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timing import Run, command_line, measure_all, ready
from torch import Tensor

from ttt_kernels import conv_norm, gated, gelu_conv, glu, residual_norm, rotate


class Shape(NamedTuple):
    op: str
    stream: str
    batch: int
    height: int
    width: int
    channels: int


SIZES = ((2, 50, 84, 384), (64, 80, 80, 192))
NORMS, OTHERS = ('residual_norm', 'conv_norm'), ('gated', 'glu', 'gelu_conv', 'rotate')
CASES = [*itertools.product(NORMS, ('float32', 'bfloat16')), *((op, 'bfloat16') for op in OTHERS)]
SHAPES = [Shape(*case, *size) for case, size in itertools.product(CASES, SIZES)]
SMOKE = [Shape(*case, 2, 3, 5, 32) for case in CASES]


def convolved(x: Tensor, weight: Tensor, bias: Tensor, hw: tuple[int, int]) -> Tensor:
    image = x.bfloat16().unflatten(1, hw).permute(0, 3, 1, 2)
    kernel = weight[:, None].bfloat16()
    out = F.conv2d(image, kernel, bias.bfloat16(), padding=1, groups=len(weight))
    return out.permute(0, 2, 3, 1).flatten(1, 2)


def eager_sum(x: Tensor, branch: Tensor, gain: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    y = x + branch
    return y, F.layer_norm(y.float(), gain.shape, gain, offset, 1e-6).bfloat16()


def eager_gelu_conv(x: Tensor, weight: Tensor, bias: Tensor, hw: tuple[int, int]) -> Tensor:
    a = F.gelu(x)
    return F.gelu(a + convolved(a, weight, bias, hw))


def eager_rotate(x: Tensor, rotation: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rotation
    return torch.view_as_real(turned).flatten(-2).bfloat16()


def contenders(
    shape: Shape, device: torch.device
) -> tuple[list[tuple[int, ...]], dict[str, Callable]]:
    """Shapes of the learned tensors and of other tokens, and the op beside torch's own."""
    hw, c = (shape.height, shape.width), shape.channels
    tokens = (shape.batch, shape.height * shape.width)
    conv, norm = [(c, 3, 3), (c,)], [(c,), (c,)]
    ours = {'dtype': torch.bfloat16}
    turns = torch.ones(tokens[1], c // 2, dtype=torch.complex64, device=device)
    return {
        'residual_norm': (
            [(*tokens, c), *norm],
            {'ours': partial(residual_norm, **ours), 'eager': eager_sum},
        ),
        'conv_norm': (
            [*conv, *norm],
            {
                'ours': partial(conv_norm, hw=hw, **ours),
                'eager': lambda x, w, b, *norm: eager_sum(x, convolved(x, w, b, hw), *norm),
            },
        ),
        'gated': (
            [(*tokens, c)],
            {'ours': gated, 'eager': lambda x, gate: (x[:, :, 0] + x[:, :, 1]) * F.gelu(gate)},
        ),
        'glu': (
            [],
            {'ours': glu, 'eager': lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]},
        ),
        'gelu_conv': (
            conv,
            {'ours': partial(gelu_conv, hw=hw), 'eager': partial(eager_gelu_conv, hw=hw)},
        ),
        'rotate': (
            [],
            {
                'ours': partial(rotate, rotation=turns),
                'eager': partial(eager_rotate, rotation=turns),
            },
        ),
    }[shape.op]


def build(name: str, shape: Shape, device: torch.device) -> Run:
    size = [shape.batch, shape.height * shape.width, shape.channels]
    if shape.op == 'gated':
        size.insert(2, 2)
    size[-1] *= {'glu': 2, 'gelu_conv': 4}.get(shape.op, 1)
    others, functions = contenders(shape._replace(channels=size[-1]), device)
    leaves = [torch.randn(size, device=device, dtype=getattr(torch, shape.stream))]
    for other in others:
        # Tokens as autocast has them; what is learned is in fp32.
        dtype = torch.bfloat16 if other[:2] == tuple(size[:2]) else torch.float32
        leaves.append(torch.randn(other, device=device, dtype=dtype))
    leaves = [x.requires_grad_() for x in leaves]
    return partial(functions[name], *leaves), leaves


def main() -> int:
    args = command_line(__doc__).parse_args()
    if (device := ready(args)) is None:
        return 1
    cases = (
        ({**shape._asdict(), 'contender': name}, partial(build, name, shape, device))
        for shape, name in itertools.product(SMOKE if args.smoke else SHAPES, ('ours', 'eager'))
    )
    return measure_all('blocks', Shape._fields, cases, args, device)


if __name__ == '__main__':
    sys.exit(main())
