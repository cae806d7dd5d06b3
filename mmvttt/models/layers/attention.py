"""Softmax and linear attention instead of an inner model, T⁵'s baselines (t5 Tab. 1)."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import without_autocast


class Attention(nn.Module, ABC):
    """Reads the keys and values without training a model."""

    # Whether a token's output depends on its neighbours, as for an `InnerModel`.
    spatial = False

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q, k, v: (B, N, H, d)` → `(B, N, H, d)`."""


class SoftmaxAttention(Attention):
    """softmax(q·kᵀ / √d)·v, as in a ViT, in O(N²)."""

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2)


class LinearAttention(Attention):
    """φ(q)·Σφ(k)ᵀv / φ(q)·Σφ(k)ᵀ with φ = ELU + 1 (Katharopoulos et al., 2020), in O(N).

    Args:
        project: Whether q and k each go through a learned d×d matrix of their head before φ
            ("Proj QK" of Tab. 1, after Hedgehog). It is initialised as the identity, as in
            Hedgehog, because the paper does not say how.
    """

    def __init__(self, num_heads: int, head_dims: int, project: bool = False) -> None:
        super().__init__()
        self.project = project
        if project:
            identity = torch.eye(head_dims).expand(num_heads, -1, -1)
            self.wq = nn.Parameter(identity.clone())
            self.wk = nn.Parameter(identity.clone())

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """φ of queries and keys `(B, N, H, d)`, as `(B, H, N, d)` in fp32 or more."""
        q, k = (x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
        if self.project:
            q, k = q @ self.wq.to(q.dtype), k @ self.wk.to(k.dtype)
        return F.elu(q) + 1, F.elu(k) + 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Sums over thousands of tokens: not in half precision.
        with without_autocast(q):
            left, right = self.features(q, k)
            state = right.mT @ v.transpose(1, 2).to(right.dtype)
            out = (left @ state) / (left @ right.sum(2, keepdim=True).mT)
        return out.transpose(1, 2).to(v.dtype)
