"""ViT³'s design space as one mixer: inner model, loss, batches, epochs, step (vit3 Sec. 4)."""

from collections.abc import Mapping

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.func import grad, vjp, vmap

from mmvttt.arguments import check_choice, check_int, check_number, checked_head_dims, checked_size
from mmvttt.registry import MODELS

from .inner_losses import INNER_LOSSES
from .inner_models import Weights, build_inner_model
from .vit3_mixer import at_least_fp32

DYNAMIC = 'dynamic'


@MODELS.register_module()
class TTTMixer(nn.Module):
    """Mixes tokens by training any inner model on (K, V), by the definition (Eq. 5), then reads Q.

    Every head of every image starts from the head's learned weights and takes
    `epochs × num_batches` gradient steps. Where the inner model is `GatedFC` or `DWConv`, trained
    by one step of 1.0 on the dot loss of all tokens, a fused kernel does the same; everything else
    runs by `torch.func`, which is the executable definition and not fast.

    Args:
        embed_dims: Channels C.
        num_heads: Heads H of d = C / H channels.
        inner: Config of the inner model: `FC`, `MLP` (`ratio`, `depth`, `residual`,
            `identity_init`), `SiLUFC`, `SwiGLU`, `GatedFC`, `Conv`, `DWConv`.
        loss: 'dot', 'l2', 'rmse', 'l1' or 'smooth_l1' (Tab. 1).
        num_batches: Mini-batches of one epoch, in the order of the tokens: B = N / num_batches
            (Tab. 2). Convolutions see the whole map of keys in each.
        epochs: How often all tokens are gone through (Tab. 2).
        step: The inner learning rate η (Tab. 3), or 'dynamic': σ(x W_η) for every token and head.
        scale: Factor s of the loss; None is d^−½, as in Sec. 8.
        damping: Divide every gradient by its norm plus one, per output channel, as ViT³ does.
        key_position: Grid (h, w) for which every mixer learns a position embedding of its keys,
            with a gain per channel; None for none. The paper's Tab. 4 counts 0.91M parameters that
            cost no FLOPs and that its text does not mention; at the grid (14, 14) this reading
            meets all of its rows.

    Raises:
        ValueError: If an option is not one of those above; the message names what is allowed.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        inner: Mapping,
        loss: str = 'dot',
        num_batches: int = 1,
        epochs: int = 1,
        step: float | str = 1.0,
        scale: float | None = None,
        damping: bool = False,
        key_position: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        head_dims = checked_head_dims(embed_dims, num_heads)
        check_choice('loss', loss, INNER_LOSSES)
        check_int('num_batches', num_batches)
        check_int('epochs', epochs)
        if step != DYNAMIC and not (isinstance(step, int | float) and 0 < step < float('inf')):
            raise ValueError(f'step={step!r}: give a positive rate (default 1.0) or {DYNAMIC!r}.')
        if scale is not None:
            check_number('scale', scale, above=0)
        if key_position is not None:
            key_position = checked_size('key_position', key_position)
        self.heads = (num_heads, head_dims)
        self.loss = loss
        self.num_batches = num_batches
        self.epochs = epochs
        self.scale = head_dims**-0.5 if scale is None else scale
        self.damping = damping
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.inner = build_inner_model(inner, num_heads, head_dims)
        self.eta = nn.Linear(embed_dims, num_heads) if step == DYNAMIC else None
        self.step = 1.0 if step == DYNAMIC else float(step)
        for linear in (self.qkv, self.proj, self.eta):
            if linear is not None:
                nn.init.trunc_normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)
        self.key_grid = key_position
        if key_position is not None:
            self.key_pos = nn.Parameter(
                torch.zeros(1, key_position[0] * key_position[1], embed_dims)
            )
            self.key_gain = nn.Parameter(torch.ones(embed_dims))
            nn.init.trunc_normal_(self.key_pos, std=0.02)
        # Whether a kernel does all of it; set it to False for the definition.
        self.fused = self.inner.fused is not None and (loss, num_batches, epochs, step) == (
            'dot',
            1,
            1,
            1.0,
        )

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Normed tokens `(B, h·w, C)` of an `(h, w)` map → mixed tokens `(B, h·w, C)`."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.key_grid is not None:
            k = k + resample_abs_pos_embed(self.key_pos, list(hw), list(self.key_grid), 0)
            k = k * self.key_gain
        q, k, v = (y.unflatten(-1, self.heads) for y in (q, k, v))
        weights = {name: at_least_fp32(w) for name, w in self.inner.named_parameters()}
        if self.fused:
            options = dict(scale=self.scale, damping=self.damping)
            out = self.inner.fused(weights, q, k, v, hw, **options)
        else:
            eta = torch.ones_like(q[..., 0]) if self.eta is None else self.eta(x).sigmoid()
            out = self._by_definition(weights, q, k, v, eta, hw)
        return self.proj(out.flatten(2))

    def _by_definition(
        self, weights: Weights, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, hw: tuple[int, int]
    ) -> Tensor:
        """`q, k, v: (B, N, H, d)`, `eta: (B, N, H)` → `(B, N, H, d)`, in fp32 or more."""

        def read(w: Weights, q: Tensor, k: Tensor, v: Tensor, eta: Tensor) -> Tensor:
            return self.inner.call(self.train_inner(w, k, v, eta, hw), q, hw)

        heads = vmap(read, in_dims=(0, 1, 1, 1, 1), out_dims=1)
        images = vmap(heads, in_dims=(None, 0, 0, 0, 0))
        with torch.autocast(q.device.type, enabled=False):
            out = images(weights, *(at_least_fp32(y) for y in (q, k, v, eta)))
        return out.to(q.dtype)

    def train_inner(
        self, weights: Weights, k: Tensor, v: Tensor, eta: Tensor, hw: tuple[int, int]
    ) -> Weights:
        """The weights of one head after its training (Eq. 5).

        Args:
            weights: Those that it starts with.
            k: `(N, d)` inputs.
            v: `(N, d)` labels.
            eta: `(N,)` weight of every token in the steps.
            hw: Size of the map, N = h·w.
        """
        loss = INNER_LOSSES[self.loss]
        batches = torch.arange(len(k), device=k.device).tensor_split(min(self.num_batches, len(k)))
        for batch in list(batches) * self.epochs:

            def predict(w: Weights, batch: Tensor = batch) -> Tensor:
                if self.inner.spatial:
                    return self.inner.call(w, k, hw)[batch]
                return self.inner.call(w, k[batch], hw)

            predicted, pull = vjp(predict, weights)
            error = grad(loss)(predicted, v[batch], self.scale)
            (gradient,) = pull(error * eta[batch, None])
            weights = {n: w - self.step * self._damped(gradient[n]) for n, w in weights.items()}
        return weights

    def _damped(self, gradient: Tensor) -> Tensor:
        if not self.damping:
            return gradient
        # What feeds one output channel: a column of a matrix, a kernel of a convolution.
        inputs = {2: (-2,), 3: (-2, -1), 4: (-3, -2, -1)}[gradient.dim()]
        return gradient / (torch.linalg.vector_norm(gradient, dim=inputs, keepdim=True) + 1)
