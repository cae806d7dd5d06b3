"""The design spaces of ViT³ and T⁵ as one mixer (vit3 Sec. 4; t5 Sec. 4, Tab. 1 to 3)."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from mmvttt.arguments import checked_head_dims
from mmvttt.errors import OptionError, UsageError

from ..build import build_function
from .attention import Attention
from .conv import DWConv2d
from .embedding import resize_positions
from .inner_losses import INNER_LOSSES, InnerLoss, dot
from .inner_models import Inner, InnerModel, Step, Weights, build_inner_model
from .inner_options import DYNAMIC, InnerOptions
from .key_norms import KEY_NORMS, KeyNorm
from .neighborhood import neighborhood_attention
from .precision import at_least_fp32, without_autocast


class InnerTraining(nn.Module):
    """Trains an inner model on (K, V) by the definition (Eq. 5), then reads Q.

    This is the part of a mixer between its projections: `mix` takes q, k and v from any layers.
    Every head of every image starts from the head's learned weights and takes `epochs ×
    num_batches` gradient steps. A fused op computes one step of 1.0 over all tokens for `GatedFC`
    and `DWConv` on the dot loss, and for `MLP` of two square layers and `SwiGLU` on the dot or L2
    loss without damping. Autograd computes all other cases. It is the executable definition and
    slow, and slower with `with_cp`, because each of a step's two gradients recomputes the block up
    to the step.

    Args:
        embed_dims: Channels C.
        num_heads: Heads H of d = C / H channels.
        inner: See `InnerOptions`.
        options: See `InnerOptions`.

    Raises:
        TypeError: If the inner model, loss or key norm is of another kind, or an option is unknown.
        ValueError: If an option is out of range. The message names the allowed values.
    """

    options_class = InnerOptions
    q_conv: nn.Module
    k_conv: nn.Module

    def __init__(self, embed_dims: int, num_heads: int, inner: Inner, **options: Any) -> None:
        super().__init__()
        head_dims = checked_head_dims(embed_dims, num_heads)
        self.options = o = InnerOptions.of(type(self).__name__, inner=inner, **options)
        self.heads = (num_heads, head_dims)
        self.inner_loss: InnerLoss = build_function('loss', o.loss, INNER_LOSSES)
        self.scale = head_dims**-0.5 if o.scale is None else o.scale
        self.add_projections(embed_dims)
        self.inner = build_inner_model(inner, num_heads, head_dims)
        # By name: FSDP's weights are not parameters while a block is recomputed.
        self._inner_names = tuple(name for name, _ in self.inner.named_parameters())
        self.eta = nn.Linear(embed_dims, num_heads) if o.step == DYNAMIC else None
        self.step = 1.0 if o.step == DYNAMIC else float(o.step)
        for linear in self.children():
            if isinstance(linear, nn.Linear):
                nn.init.trunc_normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)
        if o.key_position is not None:
            self.key_pos = nn.Parameter(torch.zeros(1, math.prod(o.key_position), embed_dims))
            self.key_gain = nn.Parameter(torch.ones(embed_dims))
            nn.init.trunc_normal_(self.key_pos, std=0.02)
        self.normalize_keys: KeyNorm | None = None
        if o.key_norm is not None:
            self.normalize_keys = build_function('key_norm', o.key_norm, KEY_NORMS)
        if o.qk_affine:
            # Scale of q, then of k.
            self.qk_scale = nn.Parameter(torch.ones(2, embed_dims))
            self.qk_offset = nn.Parameter(torch.zeros(2, embed_dims))
        both = o.locality == 'dwc_qk'
        self.q_conv = DWConv2d(embed_dims, bias=True) if both else None
        self.k_conv = DWConv2d(embed_dims, bias=True) if both else None
        self.v_conv = DWConv2d(embed_dims, bias=True) if o.locality == 'dwc_v' else None
        plain = (o.num_batches, o.epochs, o.step) == (1, 1, 1.0)
        # Whether an op does all of the training. Set it to False for the definition.
        self.fused = False
        if isinstance(self.inner, InnerModel):
            self.fused = plain and self.inner.has_op(self._one_step())
            # A weight is (H, *shape).
            self._input_dims = {
                n: self.inner.input_dims(n, w.dim() - 1) if o.damping else ()
                for n, w in self.inner.named_parameters()
            }
        elif not plain or o.damping or self.inner_loss is not dot or o.scale is not None:
            raise OptionError(
                f'{type(self.inner).__name__} trains nothing: leave out loss, num_batches, epochs, '
                'step, scale and damping, or choose an inner model.'
            )
        if o.backend is not None and not self.fused:
            raise OptionError(
                f'backend={o.backend!r}: no op does this training; there are ops for one step of '
                '1.0 over all tokens, of some models and losses. Leave backend out.'
            )

    def add_projections(self, embed_dims: int) -> None:
        """Registers a subclass's new linear layers, before all other parameters."""

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw: tuple[int, int], prefix: int = 0
    ) -> Tensor:
        """Trains on (k, v) and reads q.

        Tokens in front of the map (class, registers, text) take part in the inner step and in the
        statistics of the keys, and are read as queries. The key position, the convolutions and the
        neighbourhood belong to the map and leave the prefix unchanged.

        Args:
            x: `(B, N, C)` tokens, for the dynamic step.
            q, k, v: `(B, N, C)` projections.
            hw: Size of the map.
            prefix: Tokens in front of the map, N = prefix + h·w.

        Returns:
            `(B, N, C)`, before the output projection.
        """
        if prefix and getattr(self.inner, 'spatial', False):
            raise OptionError(
                f'{type(self.inner).__name__} convolves the map of tokens and cannot train on the '
                f'prefix={prefix} tokens in front of it: choose an inner model of single tokens, '
                "such as dict(type='SwiGLU')."
            )
        if self.options.key_position is not None:
            position = resize_positions(self.key_pos, hw, self.options.key_position)
            k = _on_map(lambda k: k + position, k, prefix) * self.key_gain
        projected = self._by_heads(q), self._by_heads(k), self._by_heads(v)
        q, k = self.shape_keys(q, k, hw, prefix)
        out = self._read(x, self._by_heads(q), self._by_heads(k), projected[2], hw)
        if self.v_conv is not None:
            conv = self.v_conv(v[:, prefix:], hw).unflatten(-1, self.heads)
            out = _on_map(lambda out: out + conv, out, prefix)
        if self.options.neighborhood is not None:
            q, k, v = (y[:, prefix:] for y in projected)
            near = neighborhood_attention(q, k, v, hw, self.options.neighborhood)
            out = _on_map(lambda out: (out + near) / 2, out, prefix)
        return out.flatten(2)

    def shape_keys(
        self, q: Tensor, k: Tensor, hw: tuple[int, int], prefix: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys `(B, N, C)`: scaled, keys normed, both convolved (t5 Sec. 4.2, 4.3)."""
        if self.options.qk_affine:
            q = q * self.qk_scale[0] + self.qk_offset[0]
            k = k * self.qk_scale[1] + self.qk_offset[1]
        if self.normalize_keys is not None:
            k = self.normalize_keys(k)
        if self.q_conv is None:
            return q, k
        return (
            _on_map(lambda q: q + self.q_conv(q, hw), q, prefix),
            _on_map(lambda k: k + self.k_conv(k, hw), k, prefix),
        )

    def no_weight_decay(self) -> set[str]:
        """Vectors and positions that are stored as matrices and must not decay."""
        names = {name for name, _ in self.named_parameters(recurse=False)}
        return names & {'key_pos', 'qk_scale', 'qk_offset'}

    def _one_step(self) -> Step:
        return Step(self.inner_loss, self.scale, self.options.damping, self.options.backend)

    def _by_heads(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, self.heads)

    def _read(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw: tuple[int, int]) -> Tensor:
        """`q, k, v: (B, N, H, d)` → `(B, N, H, d)`: trains on (k, v), reads q."""
        if isinstance(self.inner, Attention):
            return self.inner(q, k, v)
        if self.fused:
            step = self._one_step()
            return self.inner(self._inner_names, lambda w: self.inner.fused(w, q, k, v, hw, step))
        eta = torch.ones_like(q[..., 0]) if self.eta is None else self.eta(x).sigmoid()
        return self.inner(self._inner_names, lambda w: self._by_definition(w, q, k, v, eta, hw))

    def _by_definition(
        self, weights: Weights, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, hw: tuple[int, int]
    ) -> Tensor:
        """`q, k, v: (B, N, H, d)`, `eta: (B, N, H)` → `(B, N, H, d)`, in fp32 or more."""
        if torch.compiler.is_exporting():
            raise UsageError(
                f'{type(self.inner).__name__} with loss={self.options.loss!r} is trained by '
                'autograd, which cannot be exported: choose one step of 1.0 that has an op, such '
                "as inner=dict(type='SwiGLU') on the dot loss."
            )
        with without_autocast(q):
            q, k, v, steps = (at_least_fp32(y).transpose(1, 2) for y in (q, k, v, eta))
            weights = {name: w.expand(len(q), *w.shape) for name, w in weights.items()}
            out = self._call(self.train_inner(weights, k, v, steps, hw), q, hw)
        return out.transpose(1, 2).to(eta.dtype)

    # A compiled graph has no gradients of gradients, so it breaks here.
    @torch.compiler.disable
    def train_inner(
        self, weights: Weights, k: Tensor, v: Tensor, eta: Tensor, hw: tuple[int, int]
    ) -> Weights:
        """The weights after training (Eq. 5), of one head or of many, e.g. `… = B, H`.

        Gradients are autograd's, differentiable if gradients are enabled. torch.func is not used,
        because checkpointed blocks cannot run it.

        Args:
            weights: `(…, *shape)`, initial values.
            k: `(…, N, d)` inputs.
            v: `(…, N, d)` labels.
            eta: `(…, N)` weight of every token in the steps.
            hw: Size of the map, N = h·w.
        """
        differentiable = torch.is_grad_enabled()
        loss = _over_heads(lambda p, v: self.inner_loss(p, v, self.scale), k.dim() - 2)
        count = k.shape[-2]
        sizes = [len(part) for part in torch.arange(count).tensor_split(self.options.num_batches)]
        batches = [
            slice(end - size, end)
            for size, end in zip(sizes, accumulate(sizes), strict=True)
            if size
        ]
        for batch in batches * self.options.epochs:
            with torch.inference_mode(False), torch.enable_grad():
                k, v, eta = (_recordable(y) for y in (k, v, eta))
                # Frozen weights, and in evaluation all weights, become new leaves.
                start = {
                    n: w
                    if differentiable and w.requires_grad
                    else _recordable(w.detach()).requires_grad_()
                    for n, w in weights.items()
                }
                if self.inner.spatial:
                    predicted = self._call(start, k, hw)[..., batch, :]
                else:
                    predicted = self._call(start, k[..., batch, :], hw)
                losses = loss(predicted, v[..., batch, :])
                if losses.dim() > predicted.dim() - 2:
                    raise OptionError(
                        'the inner loss of a head has the shape '
                        f'{tuple(losses.shape[predicted.dim() - 2 :])}: make it a number, by '
                        '.mean() or .sum()'
                    )
                (error,) = torch.autograd.grad(losses.sum(), predicted, create_graph=differentiable)
                gradients = torch.autograd.grad(
                    predicted,
                    [*start.values()],
                    error * eta[..., batch, None],
                    create_graph=differentiable,
                )
            weights = {
                n: w - self.step * self._damped(n, gradient)
                for (n, w), gradient in zip(start.items(), gradients, strict=True)
            }
        return weights

    def _call(self, weights: Weights, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """The inner model of every head: `(…, N, d)` → `(…, N, d)`."""
        return _over_heads(lambda w, x: self.inner.call(w, x, hw), x.dim() - 2)(weights, x)

    def _damped(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient `(…, *shape)` of a weight over its norm plus one, per output channel."""
        if not self.options.damping:
            return gradient
        inputs = self._input_dims[name]
        if not inputs:
            return gradient / (gradient.abs() + 1)
        return gradient / (torch.linalg.vector_norm(gradient, dim=inputs, keepdim=True) + 1)


class TTTMixer(InnerTraining):
    """Mixes tokens by training any inner model, between a projection to q, k, v and an output
    projection.

    T⁵ is `inner=dict(type='SwiGLU'), key_norm='instance', locality='dwc_qk'`. For the options see
    `InnerTraining`.
    """

    # Positions come from convolutions outside, or from a position embedding.
    extras = ()

    def add_projections(self, embed_dims: int) -> None:
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims)
        self.proj = nn.Linear(embed_dims, embed_dims)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Normed tokens `(B, h·w, C)` of an `(h, w)` map → mixed tokens `(B, h·w, C)`."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(self.mix(x, q, k, v, hw))


def _on_map(function: Callable[[Tensor], Tensor], x: Tensor, prefix: int) -> Tensor:
    """Tokens `(B, prefix + h·w, …)` with the function applied to the map."""
    if not prefix:
        return function(x)
    return torch.cat([x[:, :prefix], function(x[:, prefix:])], 1)


def _recordable(x: Tensor) -> Tensor:
    """A tensor that autograd can record, even if `x` was made in inference mode."""
    return x.clone() if x.is_inference() else x


def _over_heads(function: Callable[..., Tensor], leading: int) -> Callable[..., Tensor]:
    """Maps a function of one head's tensors over `count` leading dimensions."""
    for _ in range(leading):
        function = vmap(function)
    return function
