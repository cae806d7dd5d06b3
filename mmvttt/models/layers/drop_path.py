"""Stochastic depth with which torch.compile compiles all blocks once, not each block."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Drops a branch for whole samples and scales the others by 1 / (1 − rate).

    The rate is a tensor. torch.compile treats a Python number (timm's, mmcv's) as a constant: with
    a rate of its own every block would be compiled separately, and from the ninth on not at all.

    Args:
        drop_prob: Fraction of the samples to drop in training, in [0, 1). It can be set later.
    """

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.register_buffer('keep', torch.tensor(1.0), persistent=False)
        self.drop_prob = drop_prob

    @property
    def drop_prob(self) -> float:
        """The rate, which a schedule may set."""
        return self._drop_prob

    @drop_prob.setter
    def drop_prob(self, rate: float) -> None:
        self._drop_prob, self.drops = rate, rate > 0
        self.keep.fill_(1.0 - rate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> 'DropPath':
        super()._apply(fn, recurse)
        # No state dict has the rate, so `to_empty` would leave an arbitrary number.
        self.keep.fill_(1.0 - self.drop_prob)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """`(B, …)` → the same."""
        if not (self.training and self.drops):
            return x
        keep = self.keep
        if keep.is_meta:
            # A state dict that was assigned to a model on the meta device has no rate.
            keep = torch.tensor(1.0 - self.drop_prob, device=x.device)
        mask = torch.bernoulli(keep.expand(x.shape[0], *[1] * (x.ndim - 1)))
        return x * (mask / keep).to(x.dtype)
