"""Parameters and FLOPs of DiT³ and its like."""

import torch
from torch import nn

from mmvttt.analysis.flops import count_cost
from mmvttt.models.generation.dit3 import DiT3


class OneImage(nn.Module):
    """The model at one time and class, for counters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros(1, dtype=torch.long, device=x.device)
        return self.model(x, zero, zero, return_dict=False)[0]


def counts(arch: str, patch: int, **options) -> tuple[float, float]:
    """Parameters in millions, the position table included; GFLOPs but for the 3×3's gradient."""
    with torch.device('meta'):
        model = DiT3(arch=arch, patch_size=patch, **options)
    table = (32 // patch) ** 2 * DiT3.arch_zoo[arch]['embed_dims']
    parameters = sum(p.numel() for p in model.parameters())
    cost = count_cost(OneImage(model), (32, 32), in_channels=4)
    # Half of this op is the gradient, which there is nine products of maps, that no counter counts.
    gradient = sum(macs for op, macs in cost.by_op.items() if 'dwconv' in op) / 2
    return (parameters + table) / 1e6, (cost.total_macs - gradient) / 1e9
