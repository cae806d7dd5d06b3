"""Wrong arguments of the ops are refused; odd but legal ones give what a contiguous copy gives."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from ops import OPS, Op
from torch import Tensor

import ttt_kernels
from ttt_kernels.ttt_glu import reference as glu_reference

from .cases import not_numbers, other_than, refused, run_cases

DTYPES = (
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float16,
    torch.float8_e4m3fn,
)
size = st.integers(1, 3)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def make(op: Op, batch: int, tokens: int, heads: int, dim: int) -> dict[str, Tensor]:
    return op.make((tokens, 3), batch=batch, heads=heads, dim=dim)


def call(op: Op, inputs: dict[str, Any], tokens: int, **options: Any) -> Tensor:
    return op.call(inputs, **{'hw': (tokens, 3), **options})


every_op = pytest.mark.parametrize('op', OPS.values(), ids=OPS)
sizes = st.tuples(size, size, size, size)


DAMAGE: dict[str, Callable[[Tensor], Any]] = {
    'one dimension less': lambda x: x[0],
    'one dimension more': lambda x: x[None],
    'a number': lambda x: x.flatten()[0],
    'one row more': lambda x: torch.cat([x, x[:1]]),
    'no rows': lambda x: x[:0],
    'no tokens': lambda x: x[:, :0],
    'one column more': lambda x: torch.cat([x, x[..., :1]], -1),
    'sparse': lambda x: x.to_sparse(),
    'elsewhere': lambda x: x.to('meta'),
    'a list': lambda x: x.tolist(),
    'an array': lambda x: x.numpy(),
    'a string': lambda x: 'x',
    **{str(dtype): (lambda x, dtype=dtype: x.to(dtype)) for dtype in DTYPES},
}
# Sizes are what these say: if they are damaged, the others disagree with them.
SAY_SIZES = {'q', 'x', 'value', 'sampling_locations', 'sampling_offsets'}
LEGAL = {
    ('deform_attn', 'value', 'one column more'),
    ('causal_conv', 'weight', 'one column more'),
    # The only one with a row for every image.
    ('causal_conv', 'x', 'one row more'),
    ('causal_conv', 'x', 'no rows'),
}


@every_op
def test_damaged_tensors(op: Op) -> None:
    tensors = list(make(op, 2, 2, 2, 2))
    values = st.tuples(st.sampled_from(tensors), st.sampled_from(sorted(DAMAGE)), sizes)

    def check(value: tuple) -> None:
        name, damage, numbers = value
        if (op.name, name, damage) in LEGAL:
            return
        inputs = make(op, *numbers)
        damaged = DAMAGE[damage](inputs[name])
        words = [op.name] if name in SAY_SIZES else [op.name, name]
        refused(lambda: call(op, {**inputs, name: damaged}, numbers[1]), *words)

    run_cases(values, check, 60)


not_finite = st.sampled_from([float('nan'), float('inf')])
# Wrong values of an option, in whatever op has it.
OPTIONS = {
    'backend': other_than('triton', 'numba', 'reference', None),
    'damping': st.integers() | not_numbers,
    'directions': other_than('forward', 'backward'),
    'eps': st.floats(max_value=-1e-9) | st.just(float('nan')) | not_numbers,
    'hw': st.lists(st.integers(-3, 1), max_size=3) | st.floats() | not_numbers,
    'loss': other_than('dot', 'l2'),
    'mini_batch_size': st.integers(max_value=0) | st.floats() | not_numbers,
    'scale': not_finite | not_numbers,
    'spatial_shapes': st.lists(st.lists(st.integers(-3, 1), max_size=3), max_size=3)
    | st.lists(st.tuples(st.floats(1, 9), st.text(max_size=1)), min_size=1, max_size=2)
    | not_numbers,
}


@every_op
def test_wrong_options(op: Op) -> None:
    inputs = make(op, 1, 3, 2, 2)
    options = inspect.signature(getattr(ttt_kernels, op.name)).parameters.keys() & OPTIONS.keys()
    assert 'backend' in options

    for name in sorted(options):

        def check(value: Any, name: str = name) -> None:
            words = [name] if name == 'backend' else [op.name, name]
            given = 'shapes' if name == 'spatial_shapes' else name
            refused(lambda: call(op, inputs, 3, **{given: value}), *words)

        run_cases(OPTIONS[name], check, 6)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    'every second number': lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    'a part of a larger one': lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
    'dimensions in another order': lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    'one row, expanded': lambda x: x[:1].expand_as(x),
    'one number, expanded': lambda x: x.flatten()[:1].view([1] * x.dim()).expand_as(x),
}


def outputs(op: Op, inputs: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The result and every gradient."""
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    out = call(op, leaves, tokens)
    grads = torch.autograd.grad((out * rand(*out.shape)).sum(), list(leaves.values()))
    return {'out': out, **dict(zip(leaves, grads, strict=True))}


@every_op
def test_odd_layouts_give_what_contiguous_copies_give(op: Op) -> None:
    tensors = list(make(op, 2, 2, 2, 2))
    values = st.tuples(
        st.dictionaries(st.sampled_from(tensors), st.sampled_from(sorted(LAYOUTS)), min_size=1),
        sizes,
    )

    def check(value: tuple) -> None:
        layouts, numbers = value
        inputs = make(op, *numbers)
        odd = {**inputs, **{n: LAYOUTS[kind](inputs[n]) for n, kind in layouts.items()}}
        plain = {n: x.clone(memory_format=torch.contiguous_format) for n, x in odd.items()}
        expected = outputs(op, plain, numbers[1])
        for name, found in outputs(op, odd, numbers[1]).items():
            # fp64; products of matrices in another layout are summed in another order.
            torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-12, msg=name)

    run_cases(values, check, 25)


@pytest.mark.parametrize('name', ['q', 'w2'])
def test_tangents_are_refused_not_dropped(name: str) -> None:
    """A custom op has no forward mode: torch would return zeros."""
    shapes = dict(q=(1, 5, 2, 4), k=(1, 5, 2, 4), v=(1, 5, 2, 4), w1=(2, 4, 4), w2=(2, 4, 4))
    tensors = {key: torch.randn(shape, dtype=torch.float64) for key, shape in shapes.items()}

    def op(x: torch.Tensor) -> torch.Tensor:
        return ttt_kernels.ttt_glu(**tensors | {name: x})

    x, t = tensors[name], torch.randn(shapes[name], dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=rf'ttt_glu: {name} .*reference\.forward'):
        torch.func.jvp(op, (x,), (t,))

    def definition(x: torch.Tensor) -> torch.Tensor:
        return glu_reference.forward(**tensors | {name: x}, scale=1 / 3, damping=True)[0]

    tangent = torch.func.jvp(definition, (x,), (t,))[1]
    # Central differences in fp64: about ε², 1e-12, and roundings of 1e-16/ε.
    step = (op(x + 1e-6 * t) - op(x - 1e-6 * t)) / 2e-6
    torch.testing.assert_close(tangent, step, rtol=0, atol=1e-7)
