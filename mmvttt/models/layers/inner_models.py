"""The inner models: what each head trains at test time (vit3 Tab. 4 and 6; t5 Tab. 1)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmvttt.arguments import check_choice, check_config, check_int, check_number
from mmvttt.registry import INNER_MODELS, resolve
from ttt_kernels import ttt_dwconv, ttt_glu, ttt_mlp

from .attention import Attention
from .inner_losses import InnerLoss, dot, l2

Weights = Mapping[str, Tensor]
Size = tuple[int, int]
# Those that ttt_mlp has; it has no damping.
MLP_LOSSES = (dot, l2)


class Step(NamedTuple):
    """One full-batch step of 1.0, and its implementation.

    Attributes:
        loss: The inner loss.
        scale: Its factor s.
        damping: Whether the gradients are damped.
        backend: Implementation of the op, if one is wanted.
    """

    loss: InnerLoss
    scale: float
    damping: bool
    backend: str | None = None


class InnerModel(nn.Module, ABC):
    """A function of d channels with weights of its own in every head, and their starting values.

    Parameters are `(H, …)`: matrices `(H, d_in, d_out)` of row vectors, full convolutions
    `(H, d_out, d_in, 3, 3)`, depth-wise ones `(H, d, 3, 3)`. A subclass names the shapes of one
    head in `__init__(num_heads, head_dims, …)` and computes its output in `call`; its training is
    autograd's. Where `fuses`, `fused` is an op for one full-batch step of 1.0.

    Args:
        num_heads: Heads H.
        shapes: Name and shape of every weight of one head; they begin as truncated normal 0.02.
    """

    # Whether a token's output depends on its neighbours.
    spatial = False

    def __init__(self, num_heads: int, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(num_heads, *shape))
            nn.init.trunc_normal_(weight, std=0.02)
            self.register_parameter(name, weight)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if 'call' in vars(cls) and 'fuses' not in vars(cls):
            # The op of a parent computes the parent's function.
            cls.fuses = InnerModel.fuses  # type: ignore[method-assign]

    @abstractmethod
    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        """The function of one head: `(N, d)` tokens of an `(h, w)` map → `(N, d)`."""

    def fuses(self, step: Step) -> bool:
        """Whether there is an op for this step."""
        return False

    def fused(self, w: Weights, q: Tensor, k: Tensor, v: Tensor, hw: Size, step: Step) -> Tensor:
        """The step and the reading of all heads in one op: `q, k, v: (B, N, H, d)` → the same."""
        raise NotImplementedError


@INNER_MODELS.register_module()
class FC(InnerModel):
    """x W."""

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, w1=(head_dims, head_dims))

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return x @ w['w1']


@INNER_MODELS.register_module()
class SiLUFC(FC):
    """silu(x W)."""

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return F.silu(super().call(w, x, hw))


@INNER_MODELS.register_module()
class MLP(InnerModel):
    """silu(… silu(x W1) …) Wl.

    Args:
        ratio: Width of the hidden layers as a multiple of d.
        depth: Layers l, at least 2.
        residual: None; 'input' adds x to the output; 'weight' adds the identity to Wl (Tab. 6).
        identity_init: Whether Wl starts as the identity (Tab. 6).
    """

    def __init__(
        self,
        num_heads: int,
        head_dims: int,
        ratio: float = 1,
        depth: int = 2,
        residual: str | None = None,
        identity_init: bool = False,
    ) -> None:
        check_number('ratio', ratio, above=0)
        check_int('depth', depth)
        hidden = int(head_dims * ratio)
        if depth < 2 or hidden < 1:
            raise ValueError(
                f'MLP(ratio={ratio}, depth={depth}): give 2 or more layers (one is FC) and a '
                'positive ratio.'
            )
        check_choice('residual', residual, (None, 'input', 'weight'))
        if hidden != head_dims and (identity_init or residual == 'weight'):
            raise ValueError(f'ratio={ratio}: an identity as the last layer needs ratio=1.')
        widths = [head_dims, *[hidden] * (depth - 1), head_dims]
        super().__init__(num_heads, **{f'w{i + 1}': widths[i : i + 2] for i in range(depth)})
        self.depth = depth
        self.residual = residual
        self.square = hidden == head_dims
        if identity_init:
            with torch.no_grad():
                self.get_parameter(f'w{depth}').copy_(torch.eye(head_dims))

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        y = x
        for i in range(1, self.depth):
            y = F.silu(y @ w[f'w{i}'])
        out = y @ w[f'w{self.depth}']
        if self.residual is None:
            return out
        return out + (x if self.residual == 'input' else y)

    def fuses(self, step: Step) -> bool:
        plain = self.depth == 2 and self.square and self.residual is None
        return plain and step.loss in MLP_LOSSES and not step.damping

    def fused(self, w: Weights, q: Tensor, k: Tensor, v: Tensor, hw: Size, step: Step) -> Tensor:
        weights = w['w1'], w['w2']
        loss = step.loss.__name__
        return ttt_mlp(q, k, v, *weights, loss=loss, scale=step.scale, backend=step.backend)


@INNER_MODELS.register_module()
class GatedFC(InnerModel):
    """(x W1) ⊙ silu(x W2), the gated heads of ViT³."""

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, w1=(head_dims, head_dims), w2=(head_dims, head_dims))

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return (x @ w['w1']) * F.silu(x @ w['w2'])

    def fuses(self, step: Step) -> bool:
        return step.loss is dot

    def fused(self, w: Weights, q: Tensor, k: Tensor, v: Tensor, hw: Size, step: Step) -> Tensor:
        weights = w['w1'], w['w2']
        return ttt_glu(
            q, k, v, *weights, scale=step.scale, damping=step.damping, backend=step.backend
        )


@INNER_MODELS.register_module()
class SwiGLU(InnerModel):
    """(silu(x W1) ⊙ x W2) W3."""

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, **{f'w{i}': (head_dims, head_dims) for i in (1, 2, 3)})

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return (F.silu(x @ w['w1']) * (x @ w['w2'])) @ w['w3']

    def fuses(self, step: Step) -> bool:
        return step.loss in MLP_LOSSES and not step.damping

    def fused(self, w: Weights, q: Tensor, k: Tensor, v: Tensor, hw: Size, step: Step) -> Tensor:
        weights = w['w1'], w['w2'], w['w3']
        loss = step.loss.__name__
        return ttt_mlp(q, k, v, *weights, loss=loss, scale=step.scale, backend=step.backend)


@INNER_MODELS.register_module()
class Conv(InnerModel):
    """A 3×3 convolution of the d channels of a head, zero padded."""

    spatial = True

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, w1=(head_dims, head_dims, 3, 3))

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return torch.einsum('ncs,ocs->no', _neighbours(x, hw), w['w1'].flatten(2))


@INNER_MODELS.register_module()
class DWConv(InnerModel):
    """A depth-wise 3×3 convolution, zero padded, the convolution head of ViT³."""

    spatial = True

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, w1=(head_dims, 3, 3))

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return torch.einsum('ncs,cs->nc', _neighbours(x, hw), w['w1'].flatten(1))

    def fuses(self, step: Step) -> bool:
        return step.loss is dot

    def fused(self, w: Weights, q: Tensor, k: Tensor, v: Tensor, hw: Size, step: Step) -> Tensor:
        # Channels know nothing of heads here.
        tokens = (x.flatten(2) for x in (q, k, v))
        weight = w['w1'].flatten(0, 1)
        out = ttt_dwconv(
            *tokens, weight, hw=hw, scale=step.scale, damping=step.damping, backend=step.backend
        )
        return out.unflatten(2, q.shape[2:])


def build_inner_model(config: Mapping, num_heads: int, head_dims: int) -> InnerModel | Attention:
    """An inner model, or an attention in its place, from `dict(type=…)` and its options.

    Raises:
        TypeError: If the type is no such class.
        ValueError: If the type is not registered.
    """
    check_config('inner', config, "dict(type='GatedFC')")
    options = dict(config)
    kind = resolve('the type of inner', options.pop('type', ''), INNER_MODELS)
    if not (isinstance(kind, type) and issubclass(kind, InnerModel | Attention)):
        raise TypeError(
            f'the type of inner is {kind!r}, which is no inner model: give a subclass of '
            'mmvttt.models.layers.InnerModel (docs/own_mixer.md).'
        )
    build: Callable[..., InnerModel | Attention] = kind
    return build(num_heads, head_dims, **options)


def _neighbours(x: Tensor, hw: Size) -> Tensor:
    """Each token's 3×3 neighbourhood, zeros outside of the map: `(h·w, d)` → `(h·w, d, 9)`."""
    h, w = hw
    image = F.pad(x.unflatten(0, hw), (0, 0, 1, 1, 1, 1))
    shifts = [image[i : i + h, j : j + w] for i in range(3) for j in range(3)]
    return torch.stack(shifts, dim=-1).flatten(0, 1)
