"""The inner losses of ViT³'s design space (vit3 Tab. 1; formulas: Sec. 8, Eq. 8–16).

Each takes predictions and values `(B, d)` of B tokens of one head and the scale s of the paper's
1/√d, and returns the mean over tokens of its sum over channels, times s.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

InnerLoss = Callable[[Tensor, Tensor, float], Tensor]


def dot(predicted: Tensor, value: Tensor, scale: float) -> Tensor:
    """−s/B · Σ V̂·V (Eq. 8)."""
    return -scale / len(value) * (predicted * value).sum()


def l2(predicted: Tensor, value: Tensor, scale: float) -> Tensor:
    """s/2B · Σ (V̂ − V)² (Eq. 10)."""
    return 0.5 * scale / len(value) * (predicted - value).square().sum()


def rmse(predicted: Tensor, value: Tensor, scale: float) -> Tensor:
    """√(s/B · Σ (V̂ − V)²) (Eq. 12), with derivatives of 0 if V̂ = V everywhere."""
    error = (predicted - value).square().sum()
    # Keeps √ away from 0, where its derivatives are not finite.
    perfect = error == 0
    root = torch.where(perfect, 0, torch.where(perfect, 1, error).sqrt())
    return (scale / len(value)) ** 0.5 * root


def l1(predicted: Tensor, value: Tensor, scale: float) -> Tensor:
    """s/B · Σ |V̂ − V| (Eq. 14), whose mixed derivative in V̂ and V vanishes."""
    return scale / len(value) * (predicted - value).abs().sum()


def smooth_l1(predicted: Tensor, value: Tensor, scale: float) -> Tensor:
    """s/B · Σ of ½x² where |x| < 1 and |x| − ½ elsewhere, x = V̂ − V (Eq. 16)."""
    return scale / len(value) * F.smooth_l1_loss(predicted, value, reduction='sum')


INNER_LOSSES: dict[str, InnerLoss] = {
    loss.__name__: loss for loss in (dot, l2, rmse, l1, smooth_l1)
}
