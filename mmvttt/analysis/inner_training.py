"""What the inner training does on images: the pictures of Vision-TTT (vision-ttt Fig. 3, 9 to 11).

A token's gradient says how much the inner model has to learn of it. Every number here comes from
what a mixer gives to the ops of `ttt_kernels`: nothing of a model is changed or repeated. Of Vittt,
which trains along the tokens, there are the gradient magnitude map, the reconstruction loss and the
drift of the state. ViT³ and T⁵ take one step over all tokens: there it is a token's share of that
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ttt_kernels._inner_step import silu_derivatives
from ttt_kernels.ttt_linear import reference

from ..errors import UsageError
from ..models.layers import TTTLinearMixer, TTTMixer, ViT3Mixer


@dataclass(frozen=True)
class ScanTraining:
    """The training of Vittt's inner models f(x) = x + LN(xW + c) along the tokens.

    B images, T tokens (with class tokens), R directions, H heads of d channels.

    Attributes:
        directions: 'f' or 'b' for each direction.
        mini_batch_size: Tokens b of one step.
        magnitude: ‖G_t‖_F `(B, T, R, H)` at the token's own place (vision-ttt Eq. 6), the gradient
            of ½‖f(k) − v‖² with respect to W and c at the state before the token's mini-batch.
        loss: ‖f(k_t) − v_t‖ `(B, T, R, H)` at the same state (Fig. 11), in the order in which the
            direction reads the tokens.
        w: W `(B, R, H, d, d)` after the last mini-batch.
        c: Bias `(B, R, H, d)` after the last mini-batch.
        drift: ‖W − W0‖/‖W0‖ `(B, R, H)`: 0 where nothing is learned, far above 1 where it diverges.
    """

    directions: str
    mini_batch_size: int
    magnitude: Tensor
    loss: Tensor
    w: Tensor
    c: Tensor
    drift: Tensor


@dataclass(frozen=True)
class LayerTraining:
    """The inner training of one mixer.

    Attributes:
        name: The mixer's name in the model.
        hw: Size of the map.
        magnitude: The map `(B, h·w)`, of patches alone. Of Vittt the root of the sum of squares
            over heads, mean over directions; of a full-batch step the norm of what a token adds to
            the gradients of all inner weights, before any damping.
        scan: Of Vittt; None for a full-batch step.
    """

    name: str
    hw: tuple[int, int]
    magnitude: Tensor
    scan: ScanTraining | None

    @property
    def variation(self) -> Tensor:
        """Standard deviation of the map over its mean, `(B,)`: 0 where all tokens count alike."""
        return self.magnitude.std(1, unbiased=False) / self.magnitude.mean(1)


def inspect_training(model: nn.Module, images: Tensor) -> list[LayerTraining]:
    """Every mixer of a model that trains by an op on images `(B, 3, H, W)`, in evaluation mode.

    Raises:
        UsageError: The model has no such mixer, or one whose training no op does, or a
            `TTTLinearMixer` that is not told the size of its map.
    """
    mixers = mixers_of(model)
    if not mixers:
        raise UsageError(
            f'{type(model).__name__} trains nothing at test time: give a Vittt, ViT³, H-ViT³ or T⁵'
        )
    ops = _Ops()
    layers: list[LayerTraining] = []

    def leave(name: str, mixer: nn.Module, args: tuple, kwargs: dict, _: Any) -> None:
        found, ops.found = ops.found, []
        layers.append(_layer(name, found, args[1:], kwargs.get('patches')))

    handles = [
        m.register_forward_hook(partial(leave, name), with_kwargs=True)
        for name, m in mixers.items()
    ]
    training = model.training
    try:
        with torch.no_grad(), ops:
            model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return layers


def mixers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The token mixers of a model that train at test time, by name."""
    kinds = TTTLinearMixer | TTTMixer | ViT3Mixer
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds)}


def _layer(name: str, found: list, place: tuple, patches: Tensor | None) -> LayerTraining:
    """Of what the ops of a mixer did; `place` begins with the size of its map."""
    if not found:
        raise UsageError(
            f'{name} trains by no op of ttt_kernels, and only what is given to one is looked at: '
            'choose an inner model that takes one step of 1.0 over all tokens, with an op for it'
        )
    if not place:
        raise UsageError(f'{name} was not told the size of its map: call it as mixer(x, (h, w))')
    if not isinstance(found[0], ScanTraining):
        return LayerTraining(name, place[0], sum(found).sqrt(), None)
    scan = found[0]
    magnitude = scan.magnitude.norm(dim=-1).mean(-1)
    return LayerTraining(
        name, place[0], magnitude if patches is None else magnitude[:, patches], scan
    )


def largest_tokens(magnitude: Tensor, share: float = 0.3) -> Tensor:
    """The tokens of the largest magnitudes, as Fig. 10 marks 30 %: `(…, N)` → booleans `(…, N)`."""
    count = max(1, round(share * magnitude.shape[-1]))
    largest = magnitude.topk(count, dim=-1).indices
    return torch.zeros_like(magnitude, dtype=torch.bool).scatter(-1, largest, True)


def follow_scan(
    inputs: reference.Inputs, directions: str, mini_batch_size: int, eps: float = 1e-6
) -> ScanTraining:
    """The training that `ttt_linear` does with these inputs, in the dtype of their states.

    The op's own G is all it takes: ∂ℓ/∂(W, c) of a token is [k, 1]ᵀ g, of norm √(‖k‖² + 1)·‖g‖, and
    a mini-batch hands on W − (e⊙K)ᵀG with e = τ_b·η.
    """
    eta, w0, b0 = inputs.eta, inputs.w0, inputs.b0
    inputs = inputs._replace(**{n: getattr(inputs, n).to(eta.dtype) for n in 'qkv'})
    # The reference's, on any device: the whole state, which a GPU's kernel keeps less its mean.
    g = reference.forward(inputs, directions, mini_batch_size, eps)[1]
    magnitude = (inputs.k.square().sum(-1) + 1).sqrt() * g.norm(dim=-1)
    # (B, R, H, T, …) in the order of the scans
    k, v, step, g = (
        reference.scan_order(x, directions).movedim(1, 3) for x in (inputs.k, inputs.v, eta, g)
    )
    if inputs.token_scale is not None:
        step = step * inputs.token_scale[:, -1, None, None]
    weight, bias = inputs.ln_weight[:, :, None], inputs.ln_bias[:, :, None]
    w, c, losses = w0, b0[:, :, None], []
    tensors = (x.split(mini_batch_size, dim=3) for x in (k, v, step[..., None] * g))
    for keys, values, steps in zip(*tensors, strict=True):
        normed = F.layer_norm(keys @ w + c, keys.shape[-1:], eps=eps)
        losses.append((keys + weight * normed + bias - values).norm(dim=-1))
        w, c = w - keys.mT @ steps, c - steps.sum(-2, keepdim=True)
    return ScanTraining(
        directions,
        mini_batch_size,
        magnitude,
        torch.cat(losses, dim=-1).movedim(3, 1),
        w,
        c.squeeze(-2),
        torch.linalg.matrix_norm(w - w0) / torch.linalg.matrix_norm(w0),
    )


# ----------------------------------------------------------------------------- the full-batch steps


def _glu(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, scale: float, *_: Any) -> Tensor:
    """‖G_t‖² of a token in ViT³'s gated heads `(B, N)`: products k_tᵀ(v⊙a) and k_tᵀ(v⊙z1⊙a′)."""
    k, v = _heads_first(w1, k, v)
    a, slope = silu_derivatives(k @ w2, 1)
    return _over_heads(_squared(k) * (_squared(v * a) + _squared(v * (k @ w1) * slope)), scale)


def _mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    scale: float,
    loss: str,
    *_: Any,
) -> Tensor:
    """‖G_t‖² of a token in the two-layer or the SwiGLU model `(B, N)`."""
    k, v = _heads_first(w1, k, v)
    a, slope = silu_derivatives(k @ w1, 1)
    up, w_out = (None, w2) if w3 is None else (k @ w2, w3)
    hidden = a if up is None else a * up
    error = -v if loss == 'dot' else hidden @ w_out - v
    below = error @ w_out.mT
    inner = _squared(below * slope if up is None else below * up * slope)
    if up is not None:
        inner = inner + _squared(below * a)
    return _over_heads(_squared(k) * inner + _squared(hidden) * _squared(error), scale)


def _dwconv(
    q: Tensor, k: Tensor, v: Tensor, w3: Tensor, h: int, w: int, scale: float, *_: Any
) -> Tensor:
    """‖G_t‖² of a token in the depth-wise convolution `(B, N)`: k[t + δ]·v[t] of the nine taps."""
    taps = k.to(w3.dtype).square().mT.unflatten(-1, (h, w))
    taps = 9 * F.avg_pool2d(taps, 3, stride=1, padding=1)  # zeros outside count
    return (taps.flatten(2).mT * v.to(w3.dtype).square()).sum(-1) * (scale / (h * w)) ** 2


def _heads_first(like: Tensor, *tokens: Tensor) -> list[Tensor]:
    return [x.to(like.dtype).transpose(1, 2) for x in tokens]


def _squared(x: Tensor) -> Tensor:
    return x.square().sum(-1)


def _over_heads(squares: Tensor, scale: float) -> Tensor:
    """The sum over heads of `(B, H, N)`, with the s/N of the inner loss."""
    return squares.sum(1) * (scale / squares.shape[-1]) ** 2


def _linear(*args: Any) -> ScanTraining:
    return follow_scan(reference.Inputs(*args[:9]), *args[9:12])


_OF_OPS = {
    torch.ops.ttt_kernels.ttt_linear: _linear,
    torch.ops.ttt_kernels.ttt_glu: _glu,
    torch.ops.ttt_kernels.ttt_mlp: _mlp,
    torch.ops.ttt_kernels.ttt_dwconv: _dwconv,
}


class _Ops(TorchDispatchMode):
    """Looks at what is given to the ops that train inner models.

    Attributes:
        found: A `ScanTraining`, or the squared shares `(B, N)`, of each op that has run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[ScanTraining | Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        look = _OF_OPS.get(func.overloadpacket)
        if look is not None:
            self.found.append(look(*args))
        return func(*args, **(kwargs or {}))
