"""ViT³'s token mixer: gated heads and one depth-wise convolution head (vit3 Sec. 5 and 9)."""

import torch
from torch import Tensor, nn

from mmvttt.arguments import check_backend, check_number, checked_head_dims
from ttt_kernels import ttt_dwconv, ttt_glu

from .precision import at_least_fp32
from .rope import rotate


class ViT3Mixer(nn.Module):
    """Mixes tokens by one full-batch step of 1.0 on (K, V) for two kinds of small models.

    H heads train `f(x) = (x W1) ⊙ silu(x W2)`, one more head trains a depth-wise 3×3 convolution,
    all on the dot product with V, every gradient divided by its norm plus one. The trained models
    read Q, and their outputs of C + d channels are projected back to C.

    Args:
        embed_dims: Channels C of the tokens.
        num_heads: Gated heads H of d = C / H channels, without the convolution head.
        scale: Factor s of the inner loss −(s / N)·Σ f(K)·V, the same in both kinds of heads.
        backend: Implementation of the ops: 'triton', 'numba' or 'reference'. None leaves the choice
            to them (docs/kernels.md).

    Raises:
        ValueError: If C does not divide into H heads, the scale is not above 0, or the backend is
            unknown.
    """

    extras = ('rotation',)

    def __init__(
        self, embed_dims: int, num_heads: int, scale: float = 1 / 3, backend: str | None = None
    ) -> None:
        super().__init__()
        self.head_dims = checked_head_dims(embed_dims, num_heads)
        check_number('scale', scale, above=0)
        check_backend('backend', backend)
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.scale = scale
        self.backend = backend
        head = self.head_dims
        # q, k, v of the gated heads (C each), then of the convolution head (d each).
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims + 3 * head)
        self.proj = nn.Linear(embed_dims + head, embed_dims)
        self.w1 = nn.Parameter(torch.empty(num_heads, head, head))
        self.w2 = nn.Parameter(torch.empty(num_heads, head, head))
        self.w3 = nn.Parameter(torch.empty(head, 3, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal 0.02 for all matrices and kernels, 0 for the biases."""
        for weight in (self.qkv.weight, self.proj.weight, self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(weight, std=0.02)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor, hw: tuple[int, int], rotation: Tensor | None = None) -> Tensor:
        """Normed tokens `(B, h·w, C)` of an `(h, w)` map → mixed tokens `(B, h·w, C)`.

        Args:
            x: The tokens.
            hw: Size of the map.
            rotation: `(h·w, C / 2)` of `rotation_2d`, for q and k of the gated heads.
        """
        # One split joins the gradients of all parts in one copy. It leaves q and k together where
        # they are rotated.
        dims = self.embed_dims
        both = [dims, dims] if rotation is None else [2 * dims]
        widths = [*both, dims, *3 * [self.head_dims]]
        *qk, v, q2, k2, v2 = self.qkv(x).split(widths, dim=-1)
        if rotation is not None:
            qk = rotate(qk[0].unflatten(-1, (2, dims)), rotation).unbind(2)
        q, k, v = (y.unflatten(-1, (self.num_heads, self.head_dims)) for y in (*qk, v))
        w1, w2, w3 = (at_least_fp32(w) for w in (self.w1, self.w2, self.w3))
        out = ttt_glu(q, k, v, w1, w2, scale=self.scale, backend=self.backend).flatten(2)
        conv = ttt_dwconv(q2, k2, v2, w3, hw=hw, scale=self.scale, backend=self.backend)
        return self.proj(torch.cat([out, conv], dim=-1))
