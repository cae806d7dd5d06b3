"""Inputs of the ops as models have them, and at their extremes: what all tests of numbers share.

recorded_tokens.csv has the sizes (root mean square) of the ops' inputs and the correlations of
neighbouring tokens, medians over the layers, in seeded models on four photographs of scikit-image,
before and after ten steps of training, and in the shipped Vittt (commit 8e48163 has the script,
tools/dev/record_tokens.py). A kind changes the inputs of size 1 that the rows of ops.py make.
"""

import csv
import functools
from collections.abc import Callable
from pathlib import Path

from op_row import Inputs
from torch import Tensor

TABLE = Path(__file__).with_name('recorded_tokens.csv')
TOKENS = ('q', 'k', 'v', 'x', 'value')
# Parameters of ttt_linear that models start with. LayerNorm divides by what little there is.
STATE = {'w0': 0.1, 'b0': 0, 'ln_bias': 0}

Kind = Callable[[Inputs], Inputs]


def scaled(**factors: float) -> Kind:
    return lambda inputs: {n: x * factors.get(n, 1) for n, x in inputs.items()}


def tokens(change: Callable[[Tensor], Tensor], *names: str) -> Kind:
    """Changes the tokens `(B, T, …)` of these names, or of all."""
    return lambda inputs: {n: change(x) if n in (names or TOKENS) else x for n, x in inputs.items()}


def of_size(size: float) -> Kind:
    return tokens(lambda x: size * x)


def at_start(kind: Kind) -> Kind:
    return lambda inputs: scaled(**STATE)(kind(inputs))


def alike(x: Tensor, correlation: float = 0.99) -> Tensor:
    """Tokens that have this correlation with their neighbours."""
    x = x.clone()
    for t in range(1, x.shape[1]):
        x[:, t] = correlation * x[:, t - 1] + (1 - correlation**2) ** 0.5 * x[:, t]
    return x


def constant_end(x: Tensor) -> Tensor:
    """A sky: from the middle on all tokens are one."""
    x, half = x.clone(), x.shape[1] // 2
    x[:, half:] = x[:, half : half + 1].clone()
    return x


def padded_end(x: Tensor) -> Tensor:
    """Zeros from the middle on, as in a batch of images of several sizes."""
    x = x.clone()
    x[:, (x.shape[1] + 1) // 2 :] = 0
    return x


def outlier(x: Tensor) -> Tensor:
    """One token, a third of the way, is a hundred times as large."""
    x = x.clone()
    x[:, x.shape[1] // 3] *= 100
    return x


def equal(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x).clone()


@functools.cache
def recorded() -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Size and correlation of the neighbours of every input, by op and '{model}, {weights}'."""
    actual: dict = {}
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            numbers = float(row['size']), float(row['neighbours'])
            name = row['op'], f'{row["model"]}, {row["weights"]}'
            actual.setdefault(name, {})[row['input']] = numbers
    return actual


def as_recorded(name: tuple[str, str]) -> Kind:
    """The sizes of all inputs, and the correlation of the tokens."""

    def kind(inputs: Inputs) -> Inputs:
        changed = dict(inputs)
        for n, (size, correlation) in recorded()[name].items():
            if n in inputs and n != 'token_scale':
                x = alike(inputs[n], correlation) if n in TOKENS else inputs[n]
                changed[n] = x * (size / x.square().mean().sqrt().clamp_min(1e-30))
        return changed

    return kind


# What a model has, whatever it has learnt.
MODELS: dict[str, Kind] = {
    **{f'size {s}': at_start(of_size(s)) for s in (1e-3, 0.03, 0.1, 0.3, 1, 10, 100)},
    'alike': at_start(tokens(lambda x: alike(0.3 * x))),
    'constant end': at_start(tokens(lambda x: constant_end(0.3 * x))),
    'padded end': at_start(tokens(lambda x: padded_end(0.3 * x))),
    'outlier': at_start(tokens(lambda x: outlier(0.3 * x))),
}
# What a model should not have, and what must not break it.
EXTREMES: dict[str, Kind] = {
    'size 1': of_size(1),
    'loud': of_size(1e3),
    'faint': of_size(1e-6),
    'zero': of_size(0),
    'equal': tokens(equal),
    'loud and equal': tokens(lambda x: 1e3 * equal(x)),
}
OF_KEYS: dict[str, Kind] = {
    'equal keys': tokens(equal, 'k'),
    'zero keys': scaled(k=0),
    'faint keys, loud values': scaled(k=1e-6, v=1e3),
    'loud keys, faint values': scaled(k=1e3, v=1e-6),
}
OF_THE_STATE: dict[str, Kind] = {
    'loud, at the start': at_start(of_size(1e3)),
    'faint, at the start': at_start(of_size(1e-6)),
    'zero keys, at the start': at_start(scaled(k=0)),
    'zero keys, loud values': at_start(scaled(k=0, v=1e3)),
}


def recorded_kinds(name: str) -> dict[str, Kind]:
    """The recorded inputs of a row of ops.py."""
    op = name.removesuffix(' SwiGLU').replace(' ', '_')
    return {model: as_recorded((op, model)) for row, model in recorded() if row == op}


def extremes(name: str) -> dict[str, Kind]:
    actual = EXTREMES
    if name in ('ttt_linear', 'ttt_glu', 'ttt_dwconv'):
        actual = actual | OF_KEYS
    return actual | OF_THE_STATE if name == 'ttt_linear' else actual
