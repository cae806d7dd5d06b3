"""Depth-wise causal convolutions in plain PyTorch: the executable specification.

- `primal`: the definition, a sum of shifted tokens, differentiable by autograd.
- `forward`, `backward`: what the op runs without kernels, using torch's convolution.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._inputs import state_dtype
from .._op import Args, Grads


def primal(x: Tensor, weight: Tensor, ways: str) -> Tensor:
    """Σ_j weight[j]·x[t ∓ (K − 1 − j)], `(B, T, R, C)`. `ways` has 'f' or 'b' for each scan."""
    tokens, taps = x.shape[1], weight.shape[-1]
    outs = []
    for r, way in enumerate(ways):
        scan = x[:, :, r].to(state_dtype(x.dtype))
        scan = scan.flip(1) if way == 'b' else scan
        past = F.pad(scan, (0, 0, taps - 1, 0))
        y = sum(weight[r, :, j] * past[:, j : j + tokens] for j in range(taps))
        outs.append(y.flip(1) if way == 'b' else y)
    return torch.stack(outs, 2).to(x.dtype)


def padded(x: Tensor, reach: int, ways: str) -> Tensor:
    """`(B, T + reach, R, C)`, fp32 or more: zeros before the first token of every scan."""
    batch, tokens, scans, channels = x.shape
    past = x.new_zeros((batch, tokens + reach, scans, channels), dtype=state_dtype(x.dtype))
    for r, start in enumerate(starts(reach, ways)):
        past[:, start : start + tokens, r] = x[:, :, r]
    return past


def starts(reach: int, ways: str) -> list[int]:
    """Index of the first token of each scan in `padded`."""
    return [0 if way == 'b' else reach for way in ways]


def _image(x: Tensor) -> Tensor:
    """`(B, T, R, C)` as an image `(B, R·C, T, 1)`, channels last.

    Tokens along the height: along the width gradients would go through other layouts.
    """
    return x.flatten(2).unsqueeze(2).permute(0, 3, 1, 2)


def _tokens(image: Tensor, scans: int) -> Tensor:
    return image.permute(0, 2, 3, 1).squeeze(2).unflatten(2, (scans, -1))


def _kernel(weight: Tensor, ways: str) -> Tensor:
    """`(R·C, 1, K, 1)`, flipped for backward scans."""
    turned = [w.flip(-1) if way == 'b' else w for w, way in zip(weight, ways, strict=True)]
    return torch.cat(turned)[:, None, :, None]


@torch.no_grad()
def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """One `(B, T, R, C)` for each weight. The second is empty where `other` is None."""
    x, weight, other, ways = args
    scans = len(ways)
    past = _image(padded(x, weight.shape[-1] - 1, ways))

    def filtered(w: Tensor) -> Tensor:
        y = F.conv2d(past, _kernel(w, ways), groups=past.shape[1])
        return _tokens(y, scans).to(x.dtype).contiguous()

    return filtered(weight), x.new_empty(0) if other is None else filtered(other)


def completed(grads: Grads, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of both results: zeros where one is unused, None where there is no second one."""
    dy, dz = grads
    if other is None:
        dz = None
    elif dz is None:
        dz = torch.zeros_like(dy)
    return torch.zeros_like(dz) if dy is None else dy, dz


@torch.no_grad()
def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and other (empty if that is None), given dy and dz."""
    x, weight, other, ways = args
    dy, dz = completed(grads, other)
    tokens, scans = x.shape[1], len(ways)
    past = _image(padded(x, weight.shape[-1] - 1, ways))
    total, dweights = None, []
    for dout, w in ((dy, weight), (dz, other)):
        if w is None:
            continue
        dpast, dkernel, _ = torch.ops.aten.convolution_backward(
            _image(dout.to(past.dtype).contiguous()),
            past,
            _kernel(w, ways),
            None,
            (1, 1),
            (0, 0),
            (1, 1),
            False,
            (0, 0),
            past.shape[1],
            (True, True, False),
        )
        total = dpast if total is None else total + dpast
        dw = dkernel.view(w.shape)
        turned = [g.flip(-1) if way == 'b' else g for g, way in zip(dw, ways, strict=True)]
        dweights.append(torch.stack(turned))
    dpast = _tokens(total, scans)
    first = starts(weight.shape[-1] - 1, ways)
    dx = torch.stack([dpast[:, s : s + tokens, r] for r, s in enumerate(first)], 2)
    return dx.to(x.dtype), dweights[0], dweights[1] if dz is not None else weight.new_empty(0)


def exported(*args: Any) -> tuple[Tensor, Tensor]:
    """`forward` in operators that exporters know: one convolution that covers both directions.

    Tokens along the width, where runtimes are several times faster than along the height.
    """
    x, weight, other, ways, _backend = args
    scans, reach = len(ways), weight.shape[-1] - 1
    image = x.to(state_dtype(x.dtype)).flatten(2).unsqueeze(1).permute(0, 3, 1, 2)

    def filtered(w: Tensor) -> Tensor:
        sides = [
            F.pad(u.flip(-1), (reach, 0)) if way == 'b' else F.pad(u, (0, reach))
            for u, way in zip(w, ways, strict=True)
        ]
        kernel = torch.cat(sides)[:, None, None]
        y = F.conv2d(image, kernel, padding=(0, reach), groups=len(kernel))
        return y.permute(0, 2, 3, 1).flatten(1, 2).unflatten(2, (scans, -1)).to(x.dtype)

    return filtered(weight), x.new_empty(0) if other is None else filtered(other)
