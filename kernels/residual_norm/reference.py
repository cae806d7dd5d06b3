"""Residual sum and LayerNorm in plain PyTorch: the executable specification.

- `primal`: the definition, differentiable by autograd.
- `forward`, `backward`: what the op runs without kernels; `gradients` is `backward` with a graph.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def primal(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    h: int,
    w: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y = x + branch, x + conv(x) where there is a weight, or x, and LN(y) in `dtype`."""
    z = x.to(ln_weight.dtype)
    if branch is not None:
        z = z + branch.to(z.dtype)
    if weight is not None:
        z = residual_conv(z, weight, bias, h, w)
    y = z.to(sum_dtype(x, branch))
    normed = F.layer_norm(y.to(z.dtype), ln_weight.shape, ln_weight, ln_bias, eps)
    return y, normed.to(dtype)


def sum_dtype(x: Tensor, branch: Tensor | None) -> torch.dtype:
    """Dtype of y, by torch's rule for sums."""
    return x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)


def to_map(x: Tensor, h: int, w: int) -> Tensor:
    """`(B, h·w, C)` as `(B, C, h, w)`, channels last."""
    return x.unflatten(1, (h, w)).permute(0, 3, 1, 2)


def tokens(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).flatten(1, 2)


def residual_conv(x: Tensor, weight: Tensor, bias: Tensor | None, h: int, w: int) -> Tensor:
    """x + conv(x) + bias, depth-wise 3×3, tokens `(B, h·w, C)` in the type of the weight."""
    return x + tokens(F.conv2d(to_map(x, h, w), weight[:, None], bias, 1, 1, 1, len(weight)))


def residual_conv_backward(
    dz: Tensor, x: Tensor, weight: Tensor, h: int, w: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `residual_conv`'s x, weight and bias."""
    dx, dkernel, dbias = torch.ops.aten.convolution_backward(
        to_map(dz, h, w).contiguous(memory_format=torch.channels_last),
        to_map(x, h, w),
        weight[:, None],
        [len(weight)],
        (1, 1),
        (1, 1),
        (1, 1),
        False,
        (0, 0),
        len(weight),
        (True, True, True),
    )
    return dz + tokens(dx), dkernel.view(weight.shape), dbias


@torch.no_grad()
def forward(x: Tensor, *rest) -> tuple[Tensor, Tensor]:
    y, normed = primal(x, *rest)
    alone = rest[0] is None and rest[1] is None
    return x.new_empty(0) if alone else y.contiguous(), normed.contiguous()


def gradients(
    dy: Tensor,
    dn: Tensor,
    y: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    ln_weight: Tensor,
    h: int,
    w: int,
    eps: float,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, branch, weight, bias, empty where there is none, and of the norm's `(2, C)`.

    Args:
        dy, dn: Gradients of y and of its norm; dy is empty where y is x.
        y: The sum.
        x: What was convolved, with the `weight`.
        dtypes: Of the gradients of x and of branch; the latter is empty where they are the same,
            as the gradients then are.
    """
    wide = y.to(ln_weight.dtype)
    mean = wide.mean(-1, keepdim=True)
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = (wide - mean) * rstd
    dn = dn.to(wide.dtype)
    inner = dn * ln_weight
    along = normed * (inner * normed).mean(-1, keepdim=True)
    dz = rstd * (inner - inner.mean(-1, keepdim=True) - along)
    if dy.dim() > 1:
        dz = dz + dy.to(wide.dtype)
    dln = torch.stack([(dn * normed).sum((0, 1)), dn.sum((0, 1))])
    dweight, dbias = wide.new_empty(0), wide.new_empty(0)
    if x is not None and weight is not None:
        # As the kernels keep it between their passes.
        dz = dz.to(y.dtype).to(wide.dtype)
        dz, dweight, dbias = residual_conv_backward(dz, x.to(wide.dtype), weight, h, w)
    dx_dtype, branch_dtype = dtypes
    own = x is None and branch_dtype != dx_dtype
    dbranch = dz.to(branch_dtype).contiguous() if own else dz.new_empty(0, dtype=branch_dtype)
    return dz.to(dx_dtype).contiguous(), dbranch, dweight, dbias, dln


backward = torch.no_grad()(gradients)
