"""The TTT-linear token mixer of Vittt, and every step of the design route of Tab. 3.

It follows Algorithm 1, lines 7 to 20. As the Remarks of App. B say, three things come from the
language-model layer: f(x) = x + LN(Wx + b), the token-index scale, and η/d with half the squared
norm. docs/fidelity.md lists the readings.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mmvttt.arguments import check_backend, check_choice, check_int, check_number, checked_head_dims
from ttt_kernels import convolved_ttt_linear, ttt_linear

from .conv import CausalConv1d
from .norms import build_activation
from .precision import at_least_fp32

DIRECTIONS = ('forward', 'backward')


class AlignedLinear(nn.Linear):
    """A Linear without bias whose results lie in rows of 16·n numbers.

    On a CPU a product with unaligned rows takes 1.3 times as long, and a GPU loads them in smaller
    pieces.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`(…, in_features)` → `(…, out_features)`, a view of the rows."""
        rest = -self.out_features % 16
        # Fake tensors count FLOPs, as the paper counts them, or are exported.
        if x.is_meta or isinstance(x, FakeTensor):
            return super().forward(x)
        # Not F.pad, which fills all of its result first.
        weight = torch.cat([self.weight, self.weight.new_zeros(rest, self.in_features)])
        return F.linear(x, weight)[..., : self.out_features]


class TTTLinearMixer(nn.Module):
    """Mixes tokens by training f(x) = x + LN(W x + b) on them, one mini-batch at a time.

    The keys are the training inputs, V − K the targets, the queries the test inputs
    (vision-ttt Sec. 4.1, App. A and B). With `directions=('forward',)`, `share_qk=False`,
    `gate_cfg=None` and `conv_kernel=0` it is the plain TTT layer, the first row of Tab. 3.

    Args:
        embed_dims: Channels D.
        num_heads: Number of heads, which divides D. Kernels take up to 128 channels a head.
        directions: The scans over the tokens: ('forward',), ('backward',) or both ('dual dataset').
        share_qk: One projection for queries and keys, which differ by their convolutions.
        gate_cfg: Activation of the output gate: a name, a class, or `dict(type='GELU')`. None
            leaves the gate out.
        conv_kernel: Taps of the causal depth-wise convolutions on q and on k. 0 leaves them out.
        mini_batch_size: Tokens b of one inner gradient step (Fig. 7a). The Triton kernels are
            fastest at 16 and pad smaller ones. Above 16 a GPU runs the reference.
        learnable_states: How many initial states (W0, b0) are learned (Fig. 7b): one for each
            direction (the default, None), 1 shared by both, or 0 for random states that are not
            trained.
        eta_base: Factor of the inner learning rate η = eta_base·σ(Linear(x))·eta_scale.
        eta_scale: See `eta_base`. None is 1/d, as in the language-model layer. 2.0 is Algorithm 1
            to the letter, whose loss is ‖·‖² without a half.
        token_scale: 'learned' scales the step of the t-th token of a mini-batch by τ_t =
            max(0, 1/t + learned), as in the language-model layer. None does not (Eq. 7).
        backend: Implementation of the op: 'triton', 'numba' or 'reference'. None leaves the choice
            to it (docs/kernels.md).

    Raises:
        ValueError: If an option is out of range. The message names the allowed values.
    """

    extras = ('patches',)
    gate_act: nn.Module

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        directions: tuple[str, ...] | list[str] = DIRECTIONS,
        share_qk: bool = True,
        gate_cfg: str | Mapping[str, Any] | type[nn.Module] | None = None,
        conv_kernel: int = 4,
        mini_batch_size: int = 16,
        learnable_states: int | None = None,
        eta_base: float = 1.0,
        eta_scale: float | None = None,
        token_scale: str | None = 'learned',
        backend: str | None = None,
    ) -> None:
        super().__init__()
        # Config files may have a list. A string would be split into letters.
        directions = tuple(directions) if isinstance(directions, list) else directions
        check_choice('directions', directions, (('forward',), ('backward',), DIRECTIONS))
        scans = len(directions)
        if learnable_states is None:
            learnable_states = scans
        head_dims = checked_head_dims(embed_dims, num_heads)
        check_int('conv_kernel', conv_kernel, 0)
        check_int('mini_batch_size', mini_batch_size)
        check_int('learnable_states', learnable_states, 0, scans)
        check_number('eta_base', eta_base, above=0)
        if eta_scale is not None:
            check_number('eta_scale', eta_scale, above=0)
        check_choice('token_scale', token_scale, (None, 'learned'))
        check_backend('backend', backend)
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.head_dims = head_dims
        self.directions = directions
        self.share_qk = share_qk
        self.mini_batch_size = mini_batch_size
        self.step_scale = eta_base * (1 / head_dims if eta_scale is None else eta_scale)
        self.backend = backend

        # Rows of the product: q, k unless it is shared, and v of all scans, then the gate and η of
        # every scan and head.
        views, gates = 2 if share_qk else 3, 0 if gate_cfg is None else embed_dims
        self.widths = [*views * [scans * embed_dims], gates, scans * num_heads]
        self.in_proj = AlignedLinear(embed_dims, sum(self.widths))
        self.eta_bias = nn.Parameter(torch.zeros(scans * num_heads))
        self.q_conv = self.k_conv = None
        if conv_kernel:
            self.q_conv = CausalConv1d(embed_dims, conv_kernel, directions)
            self.k_conv = CausalConv1d(embed_dims, conv_kernel, directions)
        self.token_scale = None
        if token_scale is not None:
            self.token_scale = nn.Parameter(torch.zeros(scans, mini_batch_size))
        for name, shape in (('w0', (head_dims, head_dims)), ('b0', (head_dims,))):
            state = torch.zeros(learnable_states or scans, num_heads, *shape)
            if learnable_states:
                self.register_parameter(name, nn.Parameter(state))
            else:
                self.register_buffer(name, state)
        self.ln_weight = nn.Parameter(torch.ones(scans, num_heads, self.head_dims))
        self.ln_bias = nn.Parameter(torch.zeros(scans, num_heads, self.head_dims))
        self.gate_act = None if gate_cfg is None else build_activation('gate_cfg', gate_cfg)
        self.proj = nn.Linear(embed_dims, embed_dims, bias=False)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(TTTLinearMixer.adapt_weights)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values as in the language-model TTT layer: normal 0.02, learned scale 0."""
        *linear, eta = self.in_proj.weight.split(self.widths)
        for weight in (*linear, self.proj.weight):
            nn.init.trunc_normal_(weight, std=0.02)
        nn.init.normal_(eta, std=0.02)
        nn.init.normal_(self.w0, std=0.02)

    def adapt_weights(self, state_dict: dict[str, Tensor], prefix: str = '', *_: Any) -> None:
        """Joins the projections of files from before `in_proj`, ordered by scan, then by q and v.

        Weights of another size stay as they are, for the report of mismatches.
        """
        old = [f'{prefix}{name}.weight' for name in ('qkv', 'gate', 'eta')]
        weights = [state_dict[name] for name in old if name in state_dict]
        bias = state_dict.get(f'{prefix}eta.bias')
        fits = [len(x) for x in weights] == [sum(self.widths[:-2]), *filter(None, self.widths[-2:])]
        if bias is None or not fits or {x.shape[1:] for x in weights} != {(self.embed_dims,)}:
            return
        for name in (*old, f'{prefix}eta.bias'):
            state_dict.pop(name, None)
        views = weights[0].unflatten(0, (len(self.directions), -1, self.embed_dims))
        weights[0] = views.transpose(0, 1).flatten(0, 2)
        state_dict[f'{prefix}in_proj.weight'] = torch.cat(weights)
        state_dict[f'{prefix}eta_bias'] = bias

    def positional_scale(self) -> Tensor | None:
        """The token-index scale max(0, 1/t + learned) of t = 1…b, `(R, b)`, if there is one."""
        if self.token_scale is None:
            return None
        learned = at_least_fp32(self.token_scale)
        t = torch.arange(1, self.mini_batch_size + 1, device=learned.device, dtype=learned.dtype)
        return (t.reciprocal() + learned).relu()

    def split(self, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Projects tokens `(B, T, D)`.

        Returns:
            q and k before their convolutions, or what they share, `(B, T, R, D)`; v `(B, T, R, H,
            d)`; η `(B, T, R, H)` ready to use; gates `(B, T, D)` before the activation, or
            `(B, T, 0)` without gate.
        """
        *views, gate, eta = self.in_proj(x).split(self.widths, dim=-1)
        *views, v = (y.unflatten(-1, (len(self.directions), -1)) for y in views)
        eta = (eta + at_least_fp32(self.eta_bias)).sigmoid() * self.step_scale
        v = v.unflatten(-1, (self.num_heads, -1))
        return views, v, eta.unflatten(-1, (-1, self.num_heads)), gate

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Test, training and label view `(B, T, R, H, d)` of tokens, and η and gates of `split`."""
        views, v, eta, gate = self.split(x)
        if self.q_conv is None:
            q, k = views[0], views[-1]
        elif self.share_qk:
            q, k = self.q_conv(views[0], others=(self.k_conv,), backend=self.backend)
        else:
            convs: Any = zip(views, (self.q_conv, self.k_conv), strict=True)
            q, k = (conv(view, backend=self.backend) for view, conv in convs)
        return q.unflatten(-1, v.shape[-2:]), k.unflatten(-1, v.shape[-2:]), v, eta, gate

    def inner_parameters(self) -> tuple[Tensor, ...]:
        """W0 `(R, H, d, d)`, b0, inner LN weight and bias `(R, H, d)`, in the state's precision."""
        scans = len(self.directions)
        w0 = at_least_fp32(self.w0).expand(scans, -1, -1, -1)
        b0 = at_least_fp32(self.b0).expand(scans, -1, -1)
        return w0, b0, at_least_fp32(self.ln_weight), at_least_fp32(self.ln_bias)

    def forward(
        self, x: Tensor, hw: tuple[int, int] | None = None, patches: Tensor | None = None
    ) -> Tensor:
        """Normed tokens `(B, T, D)` → mixed tokens `(B, T, D)`, without regard to the map."""
        parameters = (*self.inner_parameters(), self.positional_scale())
        options = dict(mini_batch_size=self.mini_batch_size, backend=self.backend)
        if self.q_conv is None or not self.share_qk:
            *tokens, gate = self.project(x)
            z = ttt_linear(*tokens, *parameters, directions=self.directions, **options)
        else:
            (shared,), *tokens, gate = self.split(x)
            z = self.q_conv(
                shared,
                others=(self.k_conv,),
                function=lambda x, *weights, **options: convolved_ttt_linear(
                    x, *weights, *tokens, *parameters, **options
                ),
                **options,
            )
        # z.sum(2) is not vectorized on a CPU.
        z = reduce(torch.add, z.unbind(2)).flatten(2)
        if self.gate_act is not None:
            # A CPU's GELU of fp32 is several times as fast on dense rows.
            z = z * self.gate_act(gate.contiguous() if gate.dtype == torch.float32 else gate)
        return self.proj(z)

    @staticmethod
    def no_weight_decay() -> set[str]:
        """Vectors that are stored as matrices and must not decay."""
        return {'b0', 'ln_weight', 'ln_bias', 'token_scale'}
