"""The inner training on images: gradient maps, losses and states (vision-ttt Eq. 6, Fig. 3, 9–11).

A token's gradient shows how much the inner model has to learn from it. Vittt's training along the
tokens is repeated by the formulas of its op, a full-batch step (ViT³, T⁵, any inner model) by
autograd. The models are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap

from ttt_kernels.ttt_linear import parts, reference

from ..errors import UsageError
from ..models.layers import InnerTraining
from ..models.layers.attention import Attention
from ..models.layers.inner_models import MLP, DWConv, GatedFC, SwiGLU
from .mixers import Mixing, record_mixers

Weights = Mapping[str, Tensor]
# Numbers of token gradients to hold at once: 64 MiB of fp32.
_AT_ONCE = 2**24


@dataclass(frozen=True)
class ScanTraining:
    """The training of Vittt's inner models f(x) = x + LN(xW + c) along the tokens.

    B images, T tokens (with class tokens), n mini-batches, R directions, H heads of d channels.
    Mini-batches are in the order in which a direction reads them.

    Attributes:
        directions: 'f' or 'b' for each direction.
        mini_batch_size: Tokens b of one step.
        magnitude: ‖G_t‖_F `(B, T, R, H)` at the token's own place (vision-ttt Eq. 6), the gradient
            of ½‖f(k) − v‖² with respect to W and c at the state before the token's mini-batch.
        rate: Learning rate η_t·τ_b `(B, T, R, H)` of a token in the state after its mini-batch, at
            the token's own position.
        loss: ‖f(k_t) − v_t‖ `(B, T, R, H)` at the state before the mini-batch (Fig. 11), in the
            order in which the direction reads the tokens.
        w: W `(B, R, H, d, d)` after the last mini-batch.
        c: Bias `(B, R, H, d)` after the last mini-batch.
        drift: ‖W_n − W_0‖_F / ‖W_0‖_F `(B, n, R, H)` after each mini-batch: near 0 it learns
            nothing, far above 1 it diverges.
        rank: Effective rank of W − W_0 after the last mini-batch `(B, R, H)`, at most min(d, T).
    """

    directions: str
    mini_batch_size: int
    magnitude: Tensor
    rate: Tensor
    loss: Tensor
    w: Tensor
    c: Tensor
    drift: Tensor
    rank: Tensor


@dataclass(frozen=True)
class StepTraining:
    """The training of H inner models on all N tokens at once, B images.

    Attributes:
        share: ‖g_t‖ `(B, N, H)` over all weights: the gradient of token t's part of the loss;
            `(B, 0, H)` where tokens were left out.
        loss_before, loss_after: Inner loss L(W_0) and L(W′) `(B, H)`.
        drift: ‖W′ − W_0‖ / ‖W_0‖ `(B, H)` over all weights.
        applied: ‖W′ − W_0‖ / ‖Σ g‖ `(B, H)`: 1 for one plain step, less with damping.
        rank: Effective rank of W′ − W_0 `(B, H)`, mean over the weights as matrices.
    """

    share: Tensor
    loss_before: Tensor
    loss_after: Tensor
    drift: Tensor
    applied: Tensor
    rank: Tensor


@dataclass(frozen=True)
class LayerTraining:
    """The inner training of one mixer: a scan, or full-batch steps of one or two kinds of heads.

    Attributes:
        name: The block's name in the model.
        hw: Size of the map.
        patches: `(h·w,)` places of the patches among the tokens.
        scan: Of Vittt, or None for full-batch steps.
        steps: One for each kind of heads, or empty for a scan.
    """

    name: str
    hw: tuple[int, int]
    patches: Tensor
    scan: ScanTraining | None = None
    steps: tuple[StepTraining, ...] = ()

    @property
    def magnitude(self) -> Tensor:
        """Gradient magnitude map `(B, h·w)`: root of the sum of squares over heads.

        Of Vittt's two directions the one that has read more tokens before (ours; the paper does not
        say how it combines them): in the first mini-batch of a scan the state is untrained, and its
        gradients are large everywhere, whatever the image.
        """
        if self.scan is None:
            return torch.cat([s.share for s in self.steps], -1).norm(dim=-1)[:, self.patches]
        scans = self.scan.magnitude.norm(dim=-1)
        read = torch.arange(scans.shape[1], device=scans.device)
        before = [read.flip(0) if way == 'b' else read for way in self.scan.directions]
        latest = torch.stack(before, 1).argmax(1)
        return scans[:, read, latest][:, self.patches]

    @property
    def variation(self) -> Tensor:
        """Standard deviation of the map over its mean, `(B,)`: 0 for a uniform map."""
        return self.magnitude.std(1, unbiased=False) / self.magnitude.mean(1)

    def scalars(self) -> dict[str, float]:
        """Means over images, heads and directions, by name.

        `loss_first` and `loss_last` are of a scan's first and last mini-batch, or before and after
        a full-batch step; `drift` and `rank` are at the end; `rate` is the learning rate (`applied`
        for a full-batch step).
        """
        scan = self.scan
        if scan is not None:
            parts = scan.loss.split(scan.mini_batch_size, dim=1)
            values = (parts[0], parts[-1], scan.drift[:, -1], scan.rank, scan.rate)
        else:
            names = ('loss_before', 'loss_after', 'drift', 'rank', 'applied')
            values = tuple(torch.cat([getattr(s, n) for s in self.steps], -1) for n in names)
        names = ('loss_first', 'loss_last', 'drift', 'rank', 'rate')
        return {n: x.mean().item() for n, x in zip(names, values, strict=True)}


def inspect_training(model: nn.Module, images: Tensor, tokens: bool = True) -> list[LayerTraining]:
    """Follows every mixer of a model that trains, on images `(B, 3, H, W)`, in evaluation mode.

    Args:
        model: Any model with such mixers.
        images: Normalised images.
        tokens: Whether to follow each token of a full-batch step, which takes most of the time.

    Raises:
        UsageError: No mixer of the model trains in a way that `training_of` can follow.
    """
    mixings = record_mixers(model, images)
    trainings = (training_of(mixing, tokens) for mixing in mixings)
    layers = [layer for layer in trainings if layer is not None]
    if not layers:
        raise UsageError(
            f'{type(mixings[0].mixer).__name__} trains nothing at test time that can be seen: it '
            'calls no op of ttt_kernels that trains, and is no InnerTraining with an inner model'
        )
    return layers


@torch.no_grad()
def training_of(mixing: Mixing, tokens: bool = True) -> LayerTraining | None:
    """Follows the training of one mixer and returns None if there is none that it can follow.

    It follows the ops of `ttt_kernels` in any mixer, and every `InnerTraining` with any inner model
    and loss. With several mini-batches or epochs of an `InnerTraining`, gradients are of all tokens
    at the initial weights, losses and drift of the whole training.
    """
    device = 'cpu' if mixing.x is None else mixing.x.device.type
    steps: list[StepTraining] = []
    with torch.autocast(device, enabled=False):
        if isinstance(mixing.mixer, InnerTraining):
            if not isinstance(mixing.mixer.inner, Attention) and mixing.shaped is not None:
                steps.append(_of_mixer(mixing, tokens))
        else:
            for name, args, _ in mixing.ops:
                if name == 'ttt_linear':
                    inputs, options = parts(args)
                    scan = follow_scan(inputs, *options)
                    return LayerTraining(mixing.label, mixing.hw, mixing.patches, scan)
                steps.append(_of_op(name, args, tokens))
    if not steps:
        return None
    return LayerTraining(mixing.label, mixing.hw, mixing.patches, None, tuple(steps))


def largest_tokens(magnitude: Tensor, share: float = 0.3) -> Tensor:
    """Marks the tokens of the largest magnitudes, as Fig. 10 does: `(…, N)` → bools `(…, N)`."""
    count = max(1, round(share * magnitude.shape[-1]))
    largest = magnitude.topk(count, dim=-1).indices
    return torch.zeros_like(magnitude, dtype=torch.bool).scatter(-1, largest, True)


def effective_rank(matrices: Tensor) -> Tensor:
    """exp(entropy of the normalised singular values) (Roy and Vetterli, 2007): `(…, a, b)` → `(…)`.

    Between 1 and min(a, b), or 0 for a zero matrix.
    """
    values = torch.linalg.svdvals(matrices)
    total = values.sum(-1, keepdim=True)
    shares = values / total.where(total > 0, 1)
    return torch.special.entr(shares).sum(-1).exp().where(total.squeeze(-1) > 0, 0)


def follow_scan(
    inputs: reference.Inputs, directions: str, mini_batch_size: int, eps: float = 1e-6
) -> ScanTraining:
    """Follows the training that `ttt_linear` does with these inputs, in the dtype of their states.

    ∂ℓ/∂(W, c) of a token is [k, 1]ᵀ g, of norm √(‖k‖² + 1)·‖g‖, and the state after a mini-batch is
    W − (e⊙K)ᵀG with e = τ_b·η.
    """
    eta, w0, b0 = inputs.eta, inputs.w0, inputs.b0
    rate = eta
    if inputs.token_scale is not None:
        rate = rate * inputs.token_scale[:, -1, None]
    # (B, R, H, T, …) in the order of the scans
    k, v, e = (
        reference.scan_order(x.to(eta.dtype), directions).movedim(1, 3)
        for x in (inputs.k, inputs.v, rate)
    )
    weight, bias = inputs.ln_weight[:, :, None], inputs.ln_bias[:, :, None]
    w, c = w0, b0[:, :, None]
    size = torch.linalg.matrix_norm(w0)
    losses, gradients, drifts = [], [], []
    tensors = (x.split(mini_batch_size, dim=3) for x in (k, v, e))
    for keys, values, steps in zip(*tensors, strict=True):
        z = keys @ w + c
        x, _, rstd = torch.native_layer_norm(z, z.shape[-1:], None, None, eps)
        error = keys + weight * x + bias - values
        losses.append(error.norm(dim=-1))
        p = weight * error
        g = (p - p.mean(-1, keepdim=True) - x * (p * x).mean(-1, keepdim=True)) * rstd
        gradients.append((keys.square().sum(-1) + 1).sqrt() * g.norm(dim=-1))
        w, c = (
            w - keys.mT @ (steps[..., None] * g),
            c - (steps[..., None] * g).sum(-2, keepdim=True),
        )
        drifts.append(torch.linalg.matrix_norm(w - w0) / size)
    magnitude = torch.cat(gradients, dim=-1).movedim(3, 1)
    return ScanTraining(
        directions,
        mini_batch_size,
        reference.scan_order(magnitude, directions),
        rate,
        torch.cat(losses, dim=-1).movedim(3, 1),
        w,
        c.squeeze(-2),
        torch.stack(drifts, 1),
        effective_rank(w - w0),
    )


# ----------------------------------------------------------------------------- the full-batch steps


def _of_mixer(mixing: Mixing, tokens: bool) -> StepTraining:
    """Follows the training of H inner models on B images, by autograd."""
    mixer = mixing.mixer
    dtype = torch.promote_types(mixing.x.dtype, torch.float32)
    _, k = (y.to(dtype).unflatten(-1, mixer.heads) for y in mixing.shaped)
    _, _, v = (y.to(dtype).unflatten(-1, mixer.heads) for y in mixing.projected)
    eta = torch.ones_like(k[..., 0])
    if mixer.eta is not None:
        eta = mixer.eta(mixing.x).sigmoid().to(dtype)
    weights = {n: w.to(dtype) for n, w in mixer.inner.named_parameters()}
    heads = [
        _follow_head(
            mixer, mixing.hw, {n: w[h] for n, w in weights.items()},
            k[b, :, h], v[b, :, h], eta[b, :, h], tokens,
        )
        for b in range(len(k))
        for h in range(k.shape[2])
    ]  # fmt: skip
    stacks = {}
    for field, values in zip(fields(StepTraining), zip(*heads, strict=True), strict=True):
        stacked = torch.stack(values).unflatten(0, (len(k), k.shape[2]))
        stacks[field.name] = stacked.mT if stacked.dim() == 3 else stacked
    return StepTraining(**stacks)


def _follow_head(
    mixer: InnerTraining,
    hw: tuple[int, int],
    weights: Weights,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    tokens: bool,
) -> tuple[Tensor, ...]:
    """The fields of `StepTraining` of one head of one image: k, v `(N, d)`, eta `(N,)`."""
    inner, spatial = mixer.inner, mixer.inner.spatial

    def predict(w: Weights, x: Tensor) -> Tensor:
        return inner.call(w, x, hw)

    def loss(predicted: Tensor, v: Tensor) -> Tensor:
        return mixer.inner_loss(predicted, v, mixer.scale)

    predicted, pull = vjp(lambda w: predict(w, k), weights)[:2]
    error = grad(loss)(predicted, v) * eta[:, None]
    (total,) = pull(error)

    def of_place(token_index: Tensor) -> Weights:
        alone = torch.zeros_like(error).index_put((token_index,), error[token_index])
        return pull(alone)[0]

    def of_token(token_index: Tensor) -> Weights:
        token = k[token_index][None]
        return vjp(lambda w: predict(w, token), weights)[1](error[token_index][None])[0]

    def norm(tree: Weights) -> Tensor:
        return sum(x.square().sum() for x in tree.values()).sqrt()

    def norm_of(token_index: Tensor) -> Tensor:
        return norm((of_place if spatial else of_token)(token_index))

    each = sum(w.numel() for w in weights.values()) + (9 * error.numel() if spatial else 0)
    chunk = max(1, _AT_ONCE // each)
    share = k.new_empty(0)
    if tokens:
        share = vmap(norm_of, chunk_size=chunk)(torch.arange(len(k), device=k.device))
    trained = mixer.train_inner(weights, k, v, eta, hw)
    moved = {n: trained[n] - w for n, w in weights.items()}
    ranks = [effective_rank(x.flatten(1) if x.dim() > 1 else x[None]) for x in moved.values()]
    return (
        share,
        loss(predicted, v),
        loss(predict(trained, k), v),
        norm(moved) / norm(weights),
        norm(moved) / norm(total),
        torch.stack(ranks).mean(0),
    )


def _of_op(name: str, args: Any, tokens: bool) -> StepTraining:
    """A step of 1.0 by an op, as the equivalent mixer on the op's k, v and weights."""
    k, v, hw = args.k, args.v, (1, args.k.shape[1])
    damping, loss = getattr(args, 'damping', False), getattr(args, 'loss', 'dot')
    if name == 'ttt_glu':
        kind, weights = GatedFC, [args.w1, args.w2]
    elif name == 'ttt_mlp':
        weights = [args.w1, args.w2] if args.w3 is None else [args.w1, args.w2, args.w3]
        kind = MLP if args.w3 is None else SwiGLU
    else:
        # One head with independent channels.
        kind, weights, hw = DWConv, [args.w3[None]], (args.h, args.w)
        k, v = k.unsqueeze(2), v.unsqueeze(2)
    heads, dim = k.shape[2:]
    step = InnerTraining(
        heads * dim, heads, dict(type=kind.__name__), loss=loss, scale=args.scale, damping=damping
    ).to(weights[0].device, weights[0].dtype)
    with torch.no_grad():
        for parameter, weight in zip(step.inner.parameters(), weights, strict=True):
            parameter.copy_(weight)
    shaped = k.flatten(2)
    return _of_mixer(
        Mixing(
            '', step, shaped, hw, projected=(shaped, shaped, v.flatten(2)), shaped=(shaped,) * 2
        ),
        tokens,
    )
