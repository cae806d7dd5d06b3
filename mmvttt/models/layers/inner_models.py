"""Inner models, which each head trains at test time (vit3 Tab. 4 and 6; t5 Tab. 1)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmvttt.arguments import check_choice, check_int, check_number
from mmvttt.errors import OptionError, OptionTypeError
from ttt_kernels import ttt_dwconv, ttt_glu, ttt_mlp

from ..build import build_part, split_config
from .attention import Attention, LinearAttention, SoftmaxAttention
from .inner_losses import InnerLoss, dot, l2
from .precision import at_least_fp32

Weights = Mapping[str, Tensor]
# A class or callable, a name, or `dict(type=…)` and options.
Inner = str | Mapping[str, Any] | Callable[[int, int], nn.Module]
Size = tuple[int, int]
# Losses of the op ttt_mlp, which has no damping.
MLP_LOSSES = (dot, l2)


class Step(NamedTuple):
    """A full-batch step of 1.0, and its implementation.

    Attributes:
        loss: The inner loss.
        scale: Its factor s.
        damping: Whether the gradients are damped.
        backend: Implementation of the op. None leaves the choice to it.
    """

    loss: InnerLoss
    scale: float
    damping: bool
    backend: str | None = None


class InnerModel(nn.Module, ABC):
    """A function of d channels with separate weights for every head, and their initial values.

    Parameters are `(H, …)`: matrices `(H, d_in, d_out)` of row vectors, full convolutions
    `(H, d_out, d_in, 3, 3)`, depth-wise ones `(H, d, 3, 3)`. A subclass names the shapes of one
    head in `__init__(num_heads, head_dims, …)` and computes its output in `call`. Autograd trains
    it, unless `fuses` returns True: then `fused` is an op for one full-batch step of 1.0. The op
    computes the `call` of the class that defines it, so a subclass with another `call` is trained
    by autograd.

    Attributes:
        spatial: Whether a token's output depends on its neighbours.
        axes: Name of a weight → names of its axes without the heads, 'out' for the output channels.
            Damping takes the norm over all other axes. Defaults: `('out',)` for vectors, `('in',
            'out')` for matrices.

    Args:
        num_heads: Heads H.
        shapes: Name and shape of every weight of one head, initialised as truncated normal 0.02.
    """

    spatial = False
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, num_heads: int, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(num_heads, *shape))
            nn.init.trunc_normal_(weight, std=0.02)
            self.register_parameter(name, weight)

    def forward(self, names: Sequence[str], run: Callable[[Weights], Tensor]) -> Tensor:
        """Calls `run` with the weights of these names, in fp32 or more.

        The weights are read in a call of the module that owns them, on which offloading relies.
        """
        return run({name: at_least_fp32(attrgetter(name)(self)) for name in names})

    @abstractmethod
    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        """The function of one head: `(N, d)` tokens of an `(h, w)` map → `(N, d)`."""

    def fuses(self, step: Step) -> bool:
        """Whether there is an op for this step."""
        return False

    def fused(self, w: Weights, q: Tensor, k: Tensor, v: Tensor, hw: Size, step: Step) -> Tensor:
        """The step and the reading of all heads in one op: `q, k, v: (B, N, H, d)` → the same."""
        raise NotImplementedError

    def has_op(self, step: Step) -> bool:
        """Whether `fused` computes this step of this model.

        It does if `call` is still the method of the class that defines `fused`, whatever is between
        the two in the method resolution order.
        """
        owner: Any = next(kind for kind in type(self).__mro__ if 'fused' in vars(kind))
        return getattr(self.call, '__func__', None) is owner.call and self.fuses(step)

    def input_dims(self, name: str, dims: int) -> tuple[int, ...]:
        """The dimensions of a weight `(…, *shape)`, counted from the end, that are not 'out'.

        Args:
            name: Name of the weight.
            dims: Number of its dimensions without the heads.
        """
        axes = self.axes.get(name, {1: ('out',), 2: ('in', 'out')}.get(dims))
        if axes is None or len(axes) != dims:
            raise OptionError(
                f'damping=True needs the axes of the {dims}-dimensional weight {name!r}: name '
                f"them in {type(self).__name__}.axes, such as {{'{name}': ('out', 'in', 'row', "
                "'column')}."
            )
        return tuple(i - dims for i, axis in enumerate(axes) if axis != 'out')


class FC(InnerModel):
    """x W."""

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, w1=(head_dims, head_dims))

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return x @ w['w1']


class SiLUFC(FC):
    """silu(x W)."""

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return F.silu(super().call(w, x, hw))


class MLP(InnerModel):
    """silu(… silu(x W1) …) Wl.

    Args:
        ratio: Width of the hidden layers as a multiple of d.
        depth: Layers l, at least 2.
        residual: 'input' adds x to the output, 'weight' adds the identity to Wl (Tab. 6).
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
            raise OptionError(
                f'MLP(ratio={ratio}, depth={depth}): give 2 or more layers (one is FC) and a '
                'positive ratio.'
            )
        check_choice('residual', residual, (None, 'input', 'weight'))
        if hidden != head_dims and (identity_init or residual == 'weight'):
            raise OptionError(f'ratio={ratio}: an identity as the last layer needs ratio=1.')
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
        loss = step.loss.__name__
        return ttt_mlp(q, k, v, *w.values(), loss=loss, scale=step.scale, backend=step.backend)


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


class SwiGLU(InnerModel):
    """(silu(x W1) ⊙ x W2) W3."""

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, **{f'w{i}': (head_dims, head_dims) for i in (1, 2, 3)})

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return (F.silu(x @ w['w1']) * (x @ w['w2'])) @ w['w3']

    def fuses(self, step: Step) -> bool:
        return step.loss in MLP_LOSSES and not step.damping

    fused = MLP.fused


class Conv(InnerModel):
    """A 3×3 convolution of the d channels of a head, zero padded."""

    spatial = True
    axes: ClassVar = {'w1': ('out', 'in', 'row', 'column')}

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, w1=(head_dims, head_dims, 3, 3))

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return torch.einsum('ncs,ocs->no', _neighbours(x, hw), w['w1'].flatten(2))


class DWConv(InnerModel):
    """A depth-wise 3×3 convolution, zero padded, the convolution head of ViT³."""

    spatial = True
    axes: ClassVar = {'w1': ('out', 'row', 'column')}

    def __init__(self, num_heads: int, head_dims: int) -> None:
        super().__init__(num_heads, w1=(head_dims, 3, 3))

    def call(self, w: Weights, x: Tensor, hw: Size) -> Tensor:
        return torch.einsum('ncs,cs->nc', _neighbours(x, hw), w['w1'].flatten(1))

    def fuses(self, step: Step) -> bool:
        return step.loss is dot

    def fused(self, w: Weights, q: Tensor, k: Tensor, v: Tensor, hw: Size, step: Step) -> Tensor:
        # The convolution treats all heads' channels alike.
        tokens = (x.flatten(2) for x in (q, k, v))
        weight = w['w1'].flatten(0, 1)
        out = ttt_dwconv(
            *tokens, weight, hw=hw, scale=step.scale, damping=step.damping, backend=step.backend
        )
        return out.unflatten(2, q.shape[2:])


INNER_MODELS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(FC, SiLUFC, MLP, GatedFC, SwiGLU, Conv, DWConv),
        *(SoftmaxAttention, LinearAttention),
    )
}


def build_inner_model(inner: Inner, num_heads: int, head_dims: int) -> InnerModel | Attention:
    """Builds an inner model, or an attention instead.

    Args:
        inner: A class or callable that is called with the heads and their channels, a name, or
            `dict(type=…)` with options.
        num_heads: Heads H.
        head_dims: Channels d of a head.

    Raises:
        TypeError: If the result is not an inner model, or an option is unknown.
        ValueError: If no inner model has this name.
    """
    kind, options = split_config('inner', inner, INNER_MODELS)
    built = build_part('inner', kind, num_heads, head_dims, **options)
    if not isinstance(built, InnerModel | Attention):
        raise OptionTypeError(
            f'inner={kind!r} made a {type(built).__name__}, which is not an inner model: give a '
            'subclass of mmvttt.models.layers.InnerModel (docs/own_mixer.md).'
        )
    return built


def _neighbours(x: Tensor, hw: Size) -> Tensor:
    """Each token's 3×3 neighbourhood, zeros outside the map: `(h·w, d)` → `(h·w, d, 9)`."""
    h, w = hw
    image = F.pad(x.unflatten(0, hw), (0, 0, 1, 1, 1, 1))
    shifts = [image[i : i + h, j : j + w] for i in range(3) for j in range(3)]
    return torch.stack(shifts, dim=-1).flatten(0, 1)
