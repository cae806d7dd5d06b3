"""A sum of branches times an activated gate in plain PyTorch: the executable specification.

- `primal`: the definition, differentiable by autograd.
- `forward`, `backward`: what the op runs without kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._inputs import state_dtype

ACTIVATIONS = {'gelu': F.gelu, 'silu': F.silu}
_BACKWARD = {'gelu': torch.ops.aten.gelu_backward, 'silu': torch.ops.aten.silu_backward}


def apart(x: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Branches `(B, N, R, C)` and gate `(B, N, C)`, views; without a gate it is x's first part."""
    return (x, gate) if gate is not None else (x[:, :, 1:], x[:, :, 0])


def primal(x: Tensor, gate: Tensor | None, bias: Tensor | None, activation: str) -> Tensor:
    """(Σ_r x_r)·act(gate) in the type of x, rounded once; act(gate) where there are no branches.

    bias: `(1 + R, C)`, of the gate and of every branch; only with the gate in x.
    """
    branches, gate = (y.to(state_dtype(x.dtype)) for y in apart(x, gate))
    if bias is not None:
        gate, branches = gate + bias[0], branches + bias[1:]
    out = ACTIVATIONS[activation](gate)
    if branches.shape[2]:
        out = branches.sum(2) * out
    return out.to(x.dtype)


@torch.no_grad()
def forward(x: Tensor, gate: Tensor | None, bias: Tensor | None, activation: str) -> Tensor:
    return primal(x, gate, bias, activation).contiguous()


@torch.no_grad()
def backward(
    do: Tensor, x: Tensor, gate: Tensor | None, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and bias, contiguous; empty where there is none."""
    wide = state_dtype(x.dtype)
    branches, a = (y.to(wide) for y in apart(x, gate))
    if bias is not None:
        a, branches = a + bias[0], branches + bias[1:]
    do = do.to(wide)
    total = branches.sum(2) if branches.shape[2] else 1
    dgate = _BACKWARD[activation](do * total, a)
    dx = (do * ACTIVATIONS[activation](a))[:, :, None].expand(branches.shape)
    if gate is not None:
        dx, dgate = (y.to(x.dtype).contiguous() for y in (dx, dgate))
        return dx, dgate, x.new_empty(0, dtype=wide)
    packed = torch.cat([dgate[:, :, None], dx], 2)
    dbias = x.new_empty(0, dtype=wide) if bias is None else packed.sum((0, 1))
    return packed.to(x.dtype).contiguous(), x.new_empty(0), dbias
