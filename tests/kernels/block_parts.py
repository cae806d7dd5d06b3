"""Inputs and calls of the fused parts of blocks for their tests."""

import functools
import math

import torch
from kernel_testing import normal
from torch import Tensor

import ttt_kernels
from ttt_kernels._inputs import state_dtype
from ttt_kernels.gated import reference as gated
from ttt_kernels.gelu_conv import reference as gelu_conv
from ttt_kernels.residual_norm import reference as residual_norm

Inputs = dict[str, Tensor]


def make_sum(
    hw, *, conv=False, bias=True, stream=False, batch=2, heads=1, dim=6,
    dtype=torch.float64, device='cpu',
) -> Inputs:  # fmt: skip
    """Inputs of residual_norm or conv_norm; tokens are a part of a wider tensor.

    Args:
        stream: Whether x is in fp32 (fp64), whatever the type of the branch.
    """
    # A norm over one channel is its bias, whatever the token: its gradients are rounding errors.
    dim = max(dim, 2)
    generator = torch.Generator().manual_seed(0)
    state = state_dtype(dtype)
    count = math.prod(hw)

    def tokens(dtype: torch.dtype) -> Tensor:
        return normal(generator, batch, count, dim + 3).to(device, dtype)[..., :dim]

    inputs = {'x': tokens(state if stream else dtype)}
    learned = {'ln_weight': (dim,), 'ln_bias': (dim,)}
    if conv:
        learned = {'weight': (dim, 3, 3), **({'bias': (dim,)} if bias else {}), **learned}
    else:
        inputs['branch'] = tokens(dtype)
    for name, shape in learned.items():
        inputs[name] = normal(generator, *shape).to(device, state)
    return inputs


def call_sum(inputs: Inputs, hw, **options) -> Tensor:
    """The sum and its norm side by side, in the type of the norm."""
    options = {'dtype': inputs['branch'].dtype, **options}
    y, normed = ttt_kernels.residual_norm(**inputs, **options)
    return torch.cat([y.to(normed.dtype), normed], -1)


def call_conv(inputs: Inputs, hw, **options) -> Tensor:
    inputs = {'bias': None, **inputs}
    y, normed = ttt_kernels.conv_norm(**inputs, hw=hw, **options)
    return torch.cat([y.to(normed.dtype), normed], -1)


def make_norm(hw, *, dim=6, **sizes) -> Inputs:
    # A norm over two channels is ±1, whatever the token.
    inputs = make_sum(hw, dim=max(dim, 3), **sizes)
    del inputs['branch']
    return inputs


def call_norm(inputs: Inputs, hw, **options) -> Tensor:
    return ttt_kernels.layer_norm(**inputs, **options)


def define_norm(inputs: Inputs, hw, eps=1e-6) -> Tensor:
    x, *learned = inputs.values()
    return residual_norm.primal(x, None, None, None, *learned, 0, 0, eps, x.dtype)[1]


def define_sum(inputs: Inputs, hw, eps=1e-6, dtype=None) -> Tensor:
    names = ('x', 'branch', 'weight', 'bias', 'ln_weight', 'ln_bias')
    tensors = (inputs.get(name) for name in names)
    return torch.cat(residual_norm.primal(*tensors, *hw, eps, inputs['x'].dtype), -1)


def make_gated(
    hw, *, branches=2, bias=False, batch=2, heads=1, dim=6, dtype=torch.float64, device='cpu'
) -> Inputs:
    """Inputs of gated, with no branches of glu or of biased_act; tokens are parts of wider ones."""
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        wide = normal(generator, batch, math.prod(hw), *shape[:-1], shape[-1] + 3)
        return wide.to(device, dtype)[..., : shape[-1]]

    if not branches:
        learned = normal(generator, 2 * dim).to(device, state_dtype(dtype))
        return {'x': tokens(2 * dim), **({'bias': learned} if bias else {})}
    return {'x': tokens(branches, dim), 'gate': tokens(dim)}


def call_gated(inputs: Inputs, hw, **options) -> Tensor:
    function = ttt_kernels.gated if 'gate' in inputs else ttt_kernels.glu
    return function(**inputs, **options)


def define_gated(inputs: Inputs, hw, activation='gelu') -> Tensor:
    return gated.primal(inputs['x'], inputs['gate'], None, activation)


def define_glu(inputs: Inputs, hw, activation='silu', parts=2) -> Tensor:
    bias = inputs.get('bias')
    bias = None if bias is None else bias.unflatten(0, (parts, -1))
    return gated.primal(inputs['x'].unflatten(-1, (parts, -1)), None, bias, activation)


def call_biased(inputs: Inputs, hw, **options) -> Tensor:
    return ttt_kernels.biased_act(**inputs, **options)


def define_biased(inputs: Inputs, hw, activation='gelu') -> Tensor:
    return define_glu(inputs, hw, activation, parts=1)


def make_rotate(hw, *, dim=6, **sizes) -> Inputs:
    """Inputs of rotate, twice `dim` channels; the rotation is made by `turns`."""
    return make_gated(hw, branches=0, dim=dim, **sizes)


def turns(x: Tensor) -> Tensor:
    dtype = torch.complex128 if x.dtype == torch.float64 else torch.complex64
    return _turns(x.shape[1], x.shape[2] // 2, dtype, x.device)


# Kept, because a CUDA graph cannot copy it from the CPU.
@functools.cache
def _turns(tokens: int, pairs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # In fp64, as large angles are inexact below it.
    angles = torch.arange(tokens * pairs, dtype=torch.float64) ** 0.7
    return torch.polar(torch.ones_like(angles), angles).view(tokens, -1).to(device, dtype)


def call_rotate(inputs: Inputs, hw, **options) -> Tensor:
    turned = options.pop('turns', None)
    turned = turns(inputs['x']) if turned is None else turned
    return ttt_kernels.rotate(inputs['x'], turned, **options)


def define_rotate(inputs: Inputs, hw) -> Tensor:
    pairs = torch.view_as_complex(inputs['x'].unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns(inputs['x'])).flatten(-2)


def make_gelu_conv(hw, **sizes) -> Inputs:
    inputs = make_sum(hw, conv=True, **sizes)
    return {n: x for n, x in inputs.items() if not n.startswith('ln_')}


def call_gelu_conv(inputs: Inputs, hw, **options) -> Tensor:
    return ttt_kernels.gelu_conv(**{'bias': None, **inputs}, hw=hw, **options)


def define_gelu_conv(inputs: Inputs, hw) -> Tensor:
    return gelu_conv.primal(inputs['x'], inputs['weight'], inputs.get('bias'), *hw)
