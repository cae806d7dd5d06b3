"""GELU, residual depth-wise 3×3 and GELU in plain PyTorch: the executable specification.

- `primal`: the definition, differentiable by autograd.
- `forward`, `backward`: what the op runs without kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..residual_norm.reference import residual_conv, residual_conv_backward

_gelu_backward = torch.ops.aten.gelu_backward


def primal(x: Tensor, weight: Tensor, bias: Tensor | None, h: int, w: int) -> Tensor:
    """gelu(a + conv(a) + bias), a = gelu(x), in the type of x; rounded once."""
    a = F.gelu(x.to(weight.dtype))
    return F.gelu(residual_conv(a, weight, bias, h, w)).to(x.dtype)


@torch.no_grad()
def forward(x: Tensor, weight: Tensor, bias: Tensor | None, h: int, w: int) -> Tensor:
    # torch's convolutions sum in another order for other strides.
    return primal(x.contiguous(), weight, bias, h, w).contiguous()


@torch.no_grad()
def backward(
    do: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, h: int, w: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, contiguous."""
    wide = x.to(weight.dtype)
    a = F.gelu(wide)
    dz = _gelu_backward(do.to(a.dtype), residual_conv(a, weight, bias, h, w))
    # As the kernels keep it between their passes.
    dz = dz.to(x.dtype).to(a.dtype)
    da, dweight, dbias = residual_conv_backward(dz, a, weight, h, w)
    return _gelu_backward(da, wide).to(x.dtype).contiguous(), dweight, dbias
