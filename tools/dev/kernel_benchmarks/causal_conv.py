"""Times the convolutions on q and k side by side with torch's, as they are and compiled.

    python tools/dev/kernel_benchmarks/causal_conv.py
    python tools/dev/kernel_benchmarks/causal_conv.py --device cpu --smoke --out /some/folder

In bf16, two convolutions of 4 taps in both directions on one view of a packed projection, at the
shapes of Vittt: forward, and with backward.
"""

import itertools
import math
import sys
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timing import Run, command_line, measure_all, ready
from torch import Tensor

from ttt_kernels import causal_conv

TAPS = 4
# Images (height, width) and their number: those of the targets of ttt_linear first.
IMAGES = (((1280, 1280), 8), ((800, 1333), 2), ((224, 224), 128), ((512, 512), 16))
CHANNELS = {'tiny': 192, 'small': 384, 'base': 768}


class Shape(NamedTuple):
    model: str
    image: str
    batch: int
    tokens: int
    channels: int


SHAPES = [
    Shape(model, f'{w}x{h}', batch, math.ceil(h / 16) * math.ceil(w / 16), channels)
    for ((h, w), batch), (model, channels) in itertools.product(IMAGES, CHANNELS.items())
]
SMOKE = [Shape('smoke', '80x112', 2, 35, 32)]


def eager(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Every scan by itself, as one would write it, in the dtype of x; `(B, T, 2, C)`."""
    outs = []
    for weight in weights:
        scans = []
        for r, past in enumerate(((TAPS - 1, 0), (0, TAPS - 1))):
            kernel = weight[r].flip(-1) if r else weight[r]
            scan = F.pad(x[:, :, r].mT, past)
            scans.append(F.conv1d(scan, kernel[:, None].to(x.dtype), groups=x.shape[-1]).mT)
        outs.append(torch.stack(scans, 2))
    return tuple(outs)


def build(name: str, shape: Shape, device: torch.device, dtype=torch.bfloat16) -> Run:
    # The projection also holds the values.
    size = (shape.batch, shape.tokens, 2, 2 * shape.channels)
    x = torch.randn(size, device=device, dtype=dtype)[..., : shape.channels]
    weights = (torch.rand(2, shape.channels, TAPS, device=device) - 0.5 for _ in range(2))
    leaves = [t.requires_grad_() for t in (x, *weights)]
    function = {'ours': causal_conv}.get(name, eager)
    if name == 'compiled':
        # Past eight compilations of one function torch runs it as it is.
        torch.compiler.reset()
        function = torch.compile(eager, dynamic=False)
    return lambda: function(*leaves), leaves


def main() -> int:
    args = command_line(__doc__).parse_args()
    if (device := ready(args)) is None:
        return 1
    contenders = ('ours', 'eager') if args.smoke else ('ours', 'eager', 'compiled')
    cases = (
        ({**shape._asdict(), 'contender': name}, partial(build, name, shape, device))
        for shape, name in itertools.product(SMOKE if args.smoke else SHAPES, contenders)
    )
    return measure_all('causal_conv', Shape._fields, cases, args, device)


if __name__ == '__main__':
    sys.exit(main())
