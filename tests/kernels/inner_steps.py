"""Inputs and calls of the full-batch inner steps of ViT³ and T⁵, for their tests."""

import dataclasses
import importlib
import math
from collections.abc import Callable

import torch
from kernel_testing import normal

from ttt_kernels import ttt_dwconv, ttt_glu, ttt_mlp
from ttt_kernels._inputs import state_dtype

# fp64 has 16 digits; sums over some thousand tokens of terms that cancel cost three or four.
FP64 = 1e-12
# With damping, s = 1/3 would leave the step tiny: this one makes it as large as the weights.
SCALE = 5.0


def make_glu(hw, dim=6, batch=2, heads=2, dtype=torch.float64, seed=0, device='cpu'):
    """Inputs by name; a seed gives one set in all dtypes. q, k and v share one projection."""
    generator = torch.Generator().manual_seed(seed)
    packed = normal(generator, batch, math.prod(hw), 3 * heads * dim + 1)
    # Moved in one piece: views that are moved one by one arrive contiguous.
    packed = packed.to(device, dtype)[..., :-1]
    q, k, v = (x.unflatten(-1, (heads, dim)) for x in packed.chunk(3, -1))
    w1, w2 = (normal(generator, heads, dim, dim) / dim**0.5 for _ in range(2))
    w1, w2 = (w.to(device, state_dtype(dtype)) for w in (w1, w2))
    return {'q': q, 'k': k, 'v': v, 'w1': w1, 'w2': w2}


def make_dwconv(hw, dim=6, batch=2, dtype=torch.float64, seed=0, device='cpu'):
    generator = torch.Generator().manual_seed(seed)
    packed = normal(generator, batch, math.prod(hw), 3 * dim + 1)
    q, k, v = packed.to(device, dtype)[..., :-1].chunk(3, -1)
    w3 = normal(generator, dim, 3, 3) / 3
    return {'q': q, 'k': k, 'v': v, 'w3': w3.to(device, state_dtype(dtype))}


def make_mlp(hw, dim=6, batch=2, heads=2, dtype=torch.float64, seed=0, device='cpu'):
    """The two-layer model's; `make_swiglu` has a third weight."""
    return make_glu(hw, dim, batch, heads, dtype, seed, device)


def make_swiglu(hw, dim=6, batch=2, heads=2, dtype=torch.float64, seed=0, device='cpu'):
    w3 = normal(torch.Generator().manual_seed(seed + 1), heads, dim, dim) / dim**0.5
    inputs = make_glu(hw, dim, batch, heads, dtype, seed, device)
    return {**inputs, 'w3': w3.to(device, state_dtype(dtype))}


def call_glu(inputs, hw, scale=SCALE, backend='reference', **options):
    return ttt_glu(**inputs, scale=scale, backend=backend, **options)


def call_dwconv(inputs, hw, scale=SCALE, backend='reference', **options):
    return ttt_dwconv(**inputs, hw=hw, scale=scale, backend=backend, **options)


def call_mlp(inputs, hw, scale=1.0, **options):
    return ttt_mlp(**inputs, scale=scale, **options)


@dataclasses.dataclass
class Case:
    """An op with one of its inner models.

    Attributes:
        make: Inputs by name, of a map (h, w) and sizes.
        call: The public function, from those inputs, (h, w) and options.
        name: Of the op.
        option: An option that chooses what is computed, and its values, the default first.
        scale: The default of `call`.
    """

    make: Callable
    call: Callable
    name: str
    option: tuple[str, tuple]
    scale: float = SCALE

    @property
    def other(self):
        """The option at its other value, for `call` and `primal`."""
        return {self.option[0]: self.option[1][1]}

    @property
    def op(self):
        return getattr(torch.ops.ttt_kernels, self.name)

    @property
    def op_backward(self):
        return getattr(torch.ops.ttt_kernels, f'{self.name}_backward')

    def tensors(self, inputs):
        """Those that the registered op takes first."""
        missing = self.name == 'ttt_mlp' and 'w3' not in inputs
        return (*inputs.values(), *[None] * missing)

    def rest(self, hw, scale=None, backend='auto'):
        """What the registered op takes after the tensors."""
        size = hw if self.name == 'ttt_dwconv' else ()
        return (*size, self.scale if scale is None else scale, self.option[1][0], backend)

    def primal(self, inputs, hw, scale=None, **options):
        """The definition."""
        size = hw if self.name == 'ttt_dwconv' else ()
        reference = importlib.import_module(f'ttt_kernels.{self.name}.reference')
        scale = self.scale if scale is None else scale
        return reference.primal(*self.tensors(inputs), *size, scale, **options)


DAMPING = ('damping', (True, False))
LOSS = ('loss', ('dot', 'l2'))
CASES = {
    'glu': Case(make_glu, call_glu, 'ttt_glu', DAMPING),
    'dwconv': Case(make_dwconv, call_dwconv, 'ttt_dwconv', DAMPING),
    'mlp': Case(make_mlp, call_mlp, 'ttt_mlp', LOSS, scale=1.0),
    'swiglu': Case(make_swiglu, call_mlp, 'ttt_mlp', LOSS, scale=1.0),
}
