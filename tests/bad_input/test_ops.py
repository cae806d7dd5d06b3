"""Forward-mode derivatives of an op are refused; tests/kernels has every wrong argument."""

import pytest
import torch

import ttt_kernels
from ttt_kernels.ttt_glu import reference as glu_reference


@pytest.mark.parametrize('name', ['q', 'w2'])
def test_tangents_are_refused_not_dropped(name: str) -> None:
    """A custom op has no forward mode: torch would return zeros."""
    shapes = dict(q=(1, 5, 2, 4), k=(1, 5, 2, 4), v=(1, 5, 2, 4), w1=(2, 4, 4), w2=(2, 4, 4))
    tensors = {key: torch.randn(shape, dtype=torch.float64) for key, shape in shapes.items()}

    def op(x: torch.Tensor) -> torch.Tensor:
        return ttt_kernels.ttt_glu(**tensors | {name: x})

    x, t = tensors[name], torch.randn(shapes[name], dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=rf'ttt_glu: {name} .*ttt_glu/reference\.py'):
        torch.func.jvp(op, (x,), (t,))

    def definition(x: torch.Tensor) -> torch.Tensor:
        return glu_reference.forward(**tensors | {name: x}, scale=1 / 3, damping=True)[0]

    tangent = torch.func.jvp(definition, (x,), (t,))[1]
    # Central differences in fp64: about ε², 1e-12, and roundings of 1e-16/ε.
    step = (op(x + 1e-6 * t) - op(x - 1e-6 * t)) / 2e-6
    torch.testing.assert_close(tangent, step, rtol=0, atol=1e-7)
