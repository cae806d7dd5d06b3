"""Every linearized family as an object: threads, copies of all kinds, and what cannot trace it."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

from mmvttt.models.linearize import linearize

from . import test_linearize as timms

# Family → builds a model, and makes the inputs of a call from a number.
Make = Callable[[int], dict[str, Any]]
FAMILIES: dict[str, Callable[[], tuple[nn.Module, Make]]] = {}


def _timm(name: str, build: Callable[[], nn.Module], fixed: bool) -> None:
    def inputs(number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        size = (64, 96) if fixed == 'staged' else (48, 80) if fixed or number % 2 else (80, 48)
        return dict(x=torch.randn(1, 3, *size, generator=generator, dtype=torch.float64))

    FAMILIES[name] = lambda: (build(), inputs)


for _name in (
    'vit_tiny_patch16_224',
    'vit_small_patch16_dinov3',
    'beit_base_patch16_224',
    'vit_relpos_small_patch16_224',
):
    _timm(_name, lambda name=_name: timms.build(name), 'beit' in _name or 'relpos' in _name)
for _staged in (timms.caformer, timms.pit, timms.volo):
    _timm(_staged.__name__, _staged, 'staged')
if find_spec('diffusers'):
    from . import test_linearize_diffusion as diffusers

    def _diffusers(name: str) -> tuple[nn.Module, Make]:
        def inputs(number: int) -> dict[str, Any]:
            actual = diffusers.inputs(name, *((12, 20) if number % 2 else (20, 12)))
            return {k: v + 0.1 * number if k == 'hidden_states' else v for k, v in actual.items()}

        return diffusers.MODELS[name](), inputs

    for _name in diffusers.MODELS:
        FAMILIES[_name] = lambda name=_name: _diffusers(name)


def _output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out = model(**inputs)
    return out if isinstance(out, Tensor) else out.sample


@pytest.mark.parametrize('family', FAMILIES)
def test_threads_and_copies(family: str) -> None:
    model, inputs = FAMILIES[family]()
    linearize(model)
    calls = [inputs(number) for number in range(4)]
    expected = [_output(model, call) for call in calls]
    assert not torch.equal(expected[0], expected[2])
    with ThreadPoolExecutor(4) as pool:
        actual = pool.map(lambda call: _output(model, call), calls)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    assert torch.equal(_output(copy.copy(model), calls[1]), expected[1])
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _output(model, calls[0])
    for other in others:
        assert torch.equal(_output(other, calls[1]), expected[1])


class _Around(nn.Module):
    """An adapter or probe around a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class _Passing(_Around):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.block(x, **kwargs)


def test_a_module_around_a_block() -> None:
    model = timms.build('vit_tiny_patch16_224')
    x = timms.images(model)
    expected = copy.deepcopy(model)
    linearize(expected)
    for wrap in (_Passing, _Around):
        wrapped = copy.deepcopy(model)
        wrapped.blocks[1] = wrap(wrapped.blocks[1])
        if wrap is _Around:
            with pytest.raises(ValueError, match=r'blocks\.1 is a _Around.*give its forward'):
                linearize(wrapped)
            assert not hasattr(wrapped, 'linearize_options')
        else:
            linearize(wrapped)
            assert wrapped(x).shape == expected(x).shape


@pytest.mark.parametrize('build', [lambda: timms.build('vit_tiny_patch16_224'), timms.caformer])
def test_symbolic_tracing_is_refused_in_words(build: Callable[[], nn.Module]) -> None:
    model = build()
    linearize(model)
    with pytest.raises(TypeError, match=r'cannot be traced by torch\.fx.*forward_intermediates'):
        create_feature_extractor(model, [name for name, _ in model.named_modules()][-1:])
