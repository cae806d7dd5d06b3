"""Wrong arguments of the ops are refused; odd but legal ones give what a contiguous copy gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
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


def linear(batch: int, tokens: int, heads: int, dim: int) -> dict[str, Any]:
    tokens_of = (batch, tokens, 2, heads)
    q, k, v = rand(3, *tokens_of, dim)
    eta = rand(*tokens_of).sigmoid()
    w0, b0, weight, bias = rand(2, heads, dim, dim), *rand(3, 2, heads, dim)
    scale = rand(2, 3).abs()
    return dict(
        **dict(q=q, k=k, v=v, eta=eta, w0=w0, b0=b0, ln_weight=weight, ln_bias=bias),
        **dict(token_scale=scale, mini_batch_size=3),
    )


def convolution(batch: int, tokens: int, heads: int, dim: int) -> dict[str, Any]:
    return dict(x=rand(batch, tokens, 2, dim), weight=rand(2, dim, heads))


def glu(batch: int, tokens: int, heads: int, dim: int) -> dict[str, Any]:
    q, k, v = rand(3, batch, tokens, heads, dim)
    w1, w2 = rand(2, heads, dim, dim)
    return dict(q=q, k=k, v=v, w1=w1, w2=w2)


def mlp(batch: int, tokens: int, heads: int, dim: int) -> dict[str, Any]:
    return dict(**glu(batch, tokens, heads, dim), w3=rand(heads, dim, dim), scale=0.5)


def dwconv(batch: int, tokens: int, heads: int, dim: int) -> dict[str, Any]:
    q, k, v = rand(3, batch, tokens * heads, dim)
    return dict(q=q, k=k, v=v, w3=rand(dim, 3, 3), hw=(tokens, heads))


def deform(batch: int, tokens: int, heads: int, dim: int) -> dict[str, Any]:
    shapes = [(tokens, 4), (2, tokens)]
    return dict(
        value=rand(batch, 6 * tokens, heads, dim),
        spatial_shapes=shapes,
        sampling_locations=rand(batch, 5, heads, 2, 3, 2).sigmoid(),
        attention_weights=rand(batch, 5, heads, 2, 3),
    )


OPS: dict[str, Callable[..., dict[str, Any]]] = {
    'ttt_linear': linear,
    'causal_conv': convolution,
    'ttt_glu': glu,
    'ttt_dwconv': dwconv,
    'ttt_mlp': mlp,
    'deform_attn': deform,
}
# How many tensors have a row for every image; of the others the first three.
OF_IMAGES = {'ttt_linear': 4, 'causal_conv': 1}
every_op = pytest.mark.parametrize('op', OPS)
sizes = st.tuples(size, size, size, size)


def names(arguments: dict[str, Any]) -> list[str]:
    """Of the tensors."""
    return [name for name, x in arguments.items() if isinstance(x, Tensor)]


def call(op: str, arguments: dict[str, Any]) -> Tensor:
    if op == 'causal_conv':  # any number of weights
        x, weight, *options = arguments.values()
        names = list(arguments)[2:]
        return ttt_kernels.causal_conv(x, weight, **dict(zip(names, options, strict=True)))[0]
    return getattr(ttt_kernels, op)(**arguments)


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
SAY_SIZES = {'q', 'x', 'value', 'sampling_locations'}
LEGAL = {
    ('deform_attn', 'value', 'one column more'),
    ('causal_conv', 'weight', 'one column more'),
    # The only one with a row for every image.
    ('causal_conv', 'x', 'one row more'),
    ('causal_conv', 'x', 'no rows'),
}


@every_op
def test_damaged_tensors(op: str) -> None:
    tensors = names(OPS[op](2, 2, 2, 2))
    values = st.tuples(st.sampled_from(tensors), st.sampled_from(sorted(DAMAGE)), sizes)

    def check(value: tuple) -> None:
        name, damage, numbers = value
        if (op, name, damage) in LEGAL:
            return
        arguments = OPS[op](*numbers)
        damaged = DAMAGE[damage](arguments[name])
        words = [op] if name in SAY_SIZES else [op, name]
        refused(lambda: call(op, {**arguments, name: damaged}), *words)

    run_cases(values, check, 60)


OPTIONS = {
    'ttt_linear': {
        'directions': other_than('forward', 'backward'),
        'mini_batch_size': st.integers(max_value=0) | st.floats() | not_numbers,
        'eps': st.floats(max_value=-1e-9) | st.just(float('nan')) | not_numbers,
        'backend': other_than('triton', 'numba', 'reference', None),
    },
    'causal_conv': {
        'directions': other_than('forward', 'backward'),
        'backend': other_than('triton', 'numba', 'reference', None),
    },
    'ttt_glu': {
        'scale': st.sampled_from([float('nan'), float('inf')]) | not_numbers,
        'damping': st.integers() | not_numbers,
        'backend': other_than('triton', 'numba', 'reference', None),
    },
    'ttt_dwconv': {
        'hw': st.lists(st.integers(-3, 1), max_size=3) | st.floats() | not_numbers,
        'scale': st.sampled_from([float('nan'), float('inf')]) | not_numbers,
        'damping': st.integers() | not_numbers,
    },
    'ttt_mlp': {
        'loss': other_than('dot', 'l2'),
        'scale': st.sampled_from([float('nan'), float('inf')]) | not_numbers,
        'backend': other_than('triton', 'numba', 'reference', None),
    },
    'deform_attn': {
        'spatial_shapes': st.lists(st.lists(st.integers(-3, 1), max_size=3), max_size=3)
        | st.lists(st.tuples(st.floats(1, 9), st.text(max_size=1)), min_size=1, max_size=2)
        | not_numbers,
        'backend': other_than('triton', 'numba', 'reference', None),
    },
}


@pytest.mark.parametrize(('op', 'name'), [(op, name) for op in OPTIONS for name in OPTIONS[op]])
def test_wrong_options(op: str, name: str) -> None:
    arguments = OPS[op](1, 3, 2, 2)

    def check(value: Any) -> None:
        words = [name] if name == 'backend' else [op, name]
        refused(lambda: call(op, {**arguments, name: value}), *words)

    run_cases(OPTIONS[op][name], check, 6)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    'every second number': lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    'a part of a larger one': lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
    'dimensions in another order': lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    'one row, expanded': lambda x: x[:1].expand_as(x),
    'one number, expanded': lambda x: x.flatten()[:1].view([1] * x.dim()).expand_as(x),
}


def outputs(op: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The result and every gradient."""
    leaves = {n: arguments[n].detach().requires_grad_() for n in names(arguments)}
    out = call(op, {**arguments, **leaves})
    grads = torch.autograd.grad((out * rand(*out.shape)).sum(), list(leaves.values()))
    return {'out': out, **dict(zip(leaves, grads, strict=True))}


@every_op
def test_odd_layouts_give_what_contiguous_copies_give(op: str) -> None:
    tensors = names(OPS[op](2, 2, 2, 2))
    values = st.tuples(
        st.dictionaries(st.sampled_from(tensors), st.sampled_from(sorted(LAYOUTS)), min_size=1),
        sizes,
    )

    def check(value: tuple) -> None:
        layouts, numbers = value
        arguments = OPS[op](*numbers)
        odd = {**arguments, **{n: LAYOUTS[kind](arguments[n]) for n, kind in layouts.items()}}
        plain = {**odd, **{n: odd[n].clone(memory_format=torch.contiguous_format) for n in tensors}}
        expected = outputs(op, plain)
        for name, found in outputs(op, odd).items():
            # fp64; products of matrices in another layout are summed in another order.
            torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-12, msg=name)

    run_cases(values, check, 25)


@every_op
def test_empty_batches(op: str) -> None:
    def check(numbers: tuple) -> None:
        arguments = OPS[op](*numbers)
        rest = names(arguments)[: OF_IMAGES.get(op, 3)]
        none = {**arguments, **{n: arguments[n][:0] for n in rest}}
        found = outputs(op, none)
        assert found['out'].shape == (0, *call(op, arguments).shape[1:])
        for name in names(none):
            assert found[name].shape == none[name].shape
            assert not found[name].any(), name

    run_cases(sizes, check, 4)


@every_op
def test_nan_stays_in_its_image_and_is_seen(op: str) -> None:
    of_images = names(OPS[op](2, 2, 2, 2))[: OF_IMAGES.get(op, 3)]
    values = st.tuples(st.sampled_from(of_images), sizes)

    def check(value: tuple) -> None:
        name, (_, *numbers) = value
        clean = OPS[op](2, *numbers)
        spoilt = {**clean, name: clean[name].clone()}
        spoilt[name][0] = float('nan')
        found, expected = call(op, spoilt), call(op, clean)
        assert found[0].isnan().any()
        torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)

    run_cases(values, check, 8)


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
