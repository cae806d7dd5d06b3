"""ViT³'s depth-wise 3×3 inner model in plain PyTorch: the executable specification of its step.

- `primal`: the definition, with the gradient of the inner loss by autograd.
- `forward`, `backward`: what the op runs without kernels, from nine shifted maps.

Maps are channels-last, `(B, h, w, d)`. The nine taps of a kernel are numbered row by row and stand
before the channels, `(…, 9, d)`, which is how the inner gradient is kept. The inner loss is
−(s/N)·Σ f(k)·v, N = h·w. Nothing is scaled by s/N before the sum over the pixels.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._inner_step import damped, damped_backward
from .._inputs import state_dtype
from .._op import Args, Grads


def primal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w3: Tensor,
    h: int,
    w: int,
    scale: float,
    damping: bool = True,
) -> Tensor:
    """The literal definition, `(B, h·w, d)`, differentiable by autograd."""
    if q.shape[0] == 0:  # convolutions in vmap want an image
        return (q + k + v + w3.sum()).to(q.dtype)
    dim, state = q.shape[-1], state_dtype(q.dtype)
    maps = (x.to(state).mT.unflatten(-1, (h, w)) for x in (q, k, v))  # (B, d, h, w)

    def f(w3: Tensor, x: Tensor) -> Tensor:
        return F.conv2d(x[None], w3[:, None], padding=1, groups=dim)[0]

    def loss(w3: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return -scale / (h * w) * (f(w3, k) * v).sum()

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        g = torch.func.grad(loss)(w3, k, v)
        if damping:
            g = g / (g.norm(dim=(1, 2), keepdim=True) + 1)
        return f(w3 - g, q)

    return torch.func.vmap(read)(*maps).flatten(2).mT.to(q.dtype).contiguous()


def shifted(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields every tap and its shifted map x[p + δ], zero outside. `x` is `(B, h, w, d)`."""
    h, w = x.shape[1:3]
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    for tap in range(9):
        row, column = divmod(tap, 3)
        yield tap, padded[:, row : row + h, column : column + w]


def correlate(x: Tensor, taps: Tensor) -> Tensor:
    """Σ_δ taps[δ]·x[p + δ]: a depth-wise convolution with kernels of its own for every image."""
    out = torch.zeros_like(x)
    for tap, moved in shifted(x):
        out.addcmul_(moved, taps[:, tap, None, None])
    return out


def products(x: Tensor, y: Tensor) -> Tensor:
    """Σ_p x[p + δ]·y[p] for every tap, `(B, 9, d)`."""
    return torch.stack([(moved * y).sum((1, 2)) for _, moved in shifted(x)], dim=1)


def _maps(h: int, w: int, *tokens: Tensor) -> list[Tensor]:
    return [x.to(state_dtype(x.dtype)).unflatten(1, (h, w)) for x in tokens]


def _tokens(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.flatten(1, 2).to(dtype).contiguous()


def _taps(w3: Tensor) -> Tensor:
    """`(d, 3, 3)` as `(9, d)`."""
    return w3.flatten(1).mT


@torch.no_grad()
def forward(args: Args, keep: bool = True) -> tuple[Tensor, Tensor]:
    """The step and the reading.

    Returns:
        O `(B, h·w, d)` contiguous, and the inner gradient before damping, `(B, 9, d)` in the
        state's dtype.
    """
    q, k, v, w3, h, w, scale, damping = args
    dtype = q.dtype
    q, k, v = _maps(h, w, q, k, v)
    g = products(k, v) * (-scale / (h * w))
    return _tokens(correlate(q, _taps(w3) - (damped(g, 1) if damping else g)), dtype), g


@torch.no_grad()
def backward(grads: Grads, args: Args, kept: Args) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and w3, given dO and the g that `forward` returned.

    Rotating a kernel by 180° reverses its taps. As in `ttt_glu`, all gradients of the step are
    linear in `j = −κH`.
    """
    (do,), (q, k, v, w3, h, w, scale, damping), (g,) = grads, args, kept
    dtype = q.dtype
    do, q, k, v = _maps(h, w, do, q, k, v)
    dq = correlate(do, (_taps(w3) - (damped(g, 1) if damping else g)).flip(1))
    dw = products(q, do)
    j = (damped_backward(dw, g, 1) if damping else dw) * (scale / (h * w))
    return (
        _tokens(dq, dtype),
        _tokens(correlate(v, j.flip(1)), dtype),
        _tokens(correlate(k, j), dtype),
        dw.sum(0).mT.reshape(w3.shape).contiguous(),
    )


def exported(*args: Any) -> tuple[Tensor, Tensor]:
    """`forward` in operators that exporters know, without in-place sums."""
    q, k, v, w3, h, w, scale, damping, _backend = args
    dtype, state = q.dtype, state_dtype(q.dtype)
    q, k, v = (x.to(state).unflatten(1, (h, w)) for x in (q, k, v))
    g = products(k, v) * (-scale / (h * w))
    taps = w3.flatten(1).mT - (damped(g, 1) if damping else g)
    out = sum(x * taps[:, tap, None, None] for tap, x in shifted(q))
    return out.flatten(1, 2).to(dtype), g
