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


def primal(x: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """(Σ_r x_r)·act(gate), in the type of x; rounded once."""
    branches, gate = (y.to(state_dtype(x.dtype)) for y in apart(x, gate))
    return (branches.sum(2) * ACTIVATIONS[activation](gate)).to(x.dtype)


@torch.no_grad()
def forward(x: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    return primal(x, gate, activation).contiguous()


@torch.no_grad()
def backward(do: Tensor, x: Tensor, gate: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of x and gate, contiguous; the second is empty without a gate."""
    wide = state_dtype(x.dtype)
    branches, a = (y.to(wide) for y in apart(x, gate))
    do = do.to(wide)
    dgate = _BACKWARD[activation](do * branches.sum(2), a)
    dx = (do * ACTIVATIONS[activation](a))[:, :, None].expand(branches.shape)
    if gate is None:
        return torch.cat([dgate[:, :, None], dx], 2).to(x.dtype), x.new_empty(0)
    return dx.to(x.dtype).contiguous(), dgate.to(x.dtype)


def exported(*arguments) -> Tensor:
    """`primal` is in operators that exporters know."""
    return primal(*arguments[:-1])
