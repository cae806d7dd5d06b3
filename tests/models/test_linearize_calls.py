"""Outputs of a linearized model depend on the call alone: threads, blocks, recomputation."""

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_reentrant_ckpt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mmvttt.models.linearize import linearize

from . import test_linearize as timms
from .building import shaken

SMALL = dict(depth=2, embed_dim=32, num_heads=2)
# Equally many patches.
WIDE, HIGH = (48, 80), (80, 48)


def linear(name: str = 'vit_tiny_patch16_224', **options) -> nn.Module:
    model = timm.create_model(name, **SMALL, num_classes=3, dynamic_img_size=True)
    linearize(model, **options)
    return shaken(model.double())


def image(size: tuple[int, int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 3, *size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'vit_small_patch16_dinov3'])
def test_a_block_outside_of_a_call_is_refused(name: str) -> None:
    """Tokens of one image, after another image of as many: no size is left behind."""
    model = linear(name)
    tokens: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    model(image(WIDE))
    model(image(HIGH))
    model.patch_embed(image(HIGH))
    for block in (model.blocks[0], model.blocks[0].attn):
        with pytest.raises(ValueError, match=r'call the model on an image, `model\(…\)`, not its'):
            block(tokens[0])


@pytest.mark.parametrize(
    ('name', 'reentrant'),
    [
        ('vit_tiny_patch16_224', False),
        ('vit_tiny_patch16_224', True),
        ('vit_small_patch16_dinov3', False),
    ],
)
def test_two_images_in_flight_with_checkpointing(name: str, reentrant: bool) -> None:
    """Both forward passes, then both backward passes, with as many tokens of other maps."""
    model = linear(name, where=[1]).train()
    calls: list[nn.Module] = []
    model.blocks[1].attn.register_forward_pre_hook(lambda module, _: calls.append(module))
    set_reentrant_ckpt(reentrant)
    grads = []
    try:
        for checkpointing in (False, True):
            model.set_grad_checkpointing(checkpointing)
            model.zero_grad()
            outs = [model(image(size)) for size in (WIDE, HIGH)]
            for out in outs:
                out.square().sum().backward()
            grads.append({n: p.grad for n, p in model.named_parameters()})
        # Twice, then twice with a recomputation each.
        assert len(calls) == 2 + 4
    finally:
        set_reentrant_ckpt(False)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=0, atol=0, msg=name)


def test_intermediates_are_of_the_call() -> None:
    model = linear('vit_small_patch16_dinov3', where=[0])
    final, (last,) = model.forward_intermediates(image(WIDE), 1, norm=True, stop_early=True)
    assert torch.equal(final, model.forward_features(image(WIDE)))
    assert torch.equal(last, final[:, 5:].mT.unflatten(2, (3, 5)))
    vit = linear()
    (tokens,) = vit.get_intermediate_layers(image(HIGH), 1, norm=True)
    assert torch.equal(tokens, vit.forward_features(image(HIGH))[:, 1:])


def test_a_pruned_model_of_another_size() -> None:
    model = linear()
    expected = model.forward_intermediates(image(WIDE), [0], intermediates_only=True)[0]
    model.prune_intermediate_layers([0])
    model.set_input_size(WIDE)
    actual = model.forward_intermediates(image(WIDE), [0], intermediates_only=True)[0]
    # The position embedding is resized once more, or not: fp64.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize('where', ['t5', 'dit5'])
def test_what_a_low_rank_training_must_not_freeze(where: str) -> None:
    model = timm.create_model('vit_tiny_patch16_224', **SMALL)
    record = linearize(model, where)
    assert record.modules_to_save == ['inner', 'k_conv', 'q_conv']
    assert repr(record.modules_to_save) in str(record)
    # PEFT matches the ends of the modules' names: each new parameter, and none of the source's.
    saved = {
        f'{name}.{own}'
        for name, module in model.named_modules()
        if name.rpartition('.')[2] in record.modules_to_save
        for own, _ in module.named_parameters()
    }
    assert saved == {n for n in record.new if not n.endswith(('qk_scale', 'qk_offset'))}


# Family → builds a model, and makes the inputs of a call from a number.
Make = Callable[[int], dict[str, Any]]


def of_timm(model: nn.Module, *sizes: tuple[int, int]) -> tuple[nn.Module, Make]:
    def inputs(number: int) -> dict[str, Any]:
        return dict(x=image(sizes[number % len(sizes)], number))

    return model, inputs


def of_diffusers(name: str) -> tuple[nn.Module, Make]:
    def inputs(number: int) -> dict[str, Any]:
        actual = diffusers.inputs(name, *((12, 20) if number % 2 else (20, 12)))
        return actual | dict(hidden_states=actual['hidden_states'] + 0.1 * number)

    return diffusers.build(name), inputs


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Make]]] = {
    **{
        name: lambda name=name: of_timm(timms.build(name), WIDE, HIGH)
        for name in ('vit_tiny_patch16_224', 'vit_small_patch16_dinov3')
    },
    **{
        name: lambda name=name: of_timm(timms.build(name), WIDE)
        for name in ('beit_base_patch16_224', 'vit_relpos_small_patch16_224')
    },
    **{
        make.__name__: lambda make=make: of_timm(make(), (64, 96))
        for make in (timms.caformer, timms.pit, timms.volo)
    },
}
if find_spec('diffusers'):
    from . import test_linearize_diffusion as diffusers

    for _name in diffusers.CONFIGS:
        FAMILIES[_name] = lambda name=_name: of_diffusers(name)


def _output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out = model(**inputs)
    return out if isinstance(out, Tensor) else out.sample


@pytest.mark.parametrize('partly', [False, True])
@pytest.mark.parametrize('family', FAMILIES)
def test_threads_and_copies(family: str, partly: bool) -> None:
    """Every thread stops before each LayerNorm until all are there."""
    model, inputs = FAMILIES[family]()
    names = linearize(copy.deepcopy(model)).replaced
    linearize(model, names[-1] if partly else 'all')
    calls = [inputs(number) for number in range(4)]
    expected = [_output(model, call) for call in calls]
    assert not torch.equal(expected[0], expected[2])
    together = threading.Barrier(len(calls), timeout=60)

    def meet(module: nn.Module, _: object) -> None:
        if isinstance(module, nn.LayerNorm):
            together.wait()

    handle = nn.modules.module.register_module_forward_pre_hook(meet)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            actual = list(pool.map(lambda call: _output(model, call), calls))
    finally:
        handle.remove()
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    assert torch.equal(_output(copy.copy(model), calls[1]), expected[1])
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _output(model, calls[0])
    for other in others:
        assert torch.equal(_output(other, calls[1]), expected[1])


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'vit_small_patch16_dinov3'])
def test_a_shallow_copy_with_other_blocks(name: str) -> None:
    model = linear(name)
    short = copy.copy(model)
    short._modules = dict(model._modules, blocks=model.blocks[:1])
    final, (first,) = model.forward_intermediates(image(WIDE), [0], norm=True)
    prefix = model.num_prefix_tokens
    actual = short.forward_features(image(WIDE))
    assert torch.equal(actual[:, prefix:].mT.unflatten(2, (3, 5)), first)
    assert not torch.equal(actual, final)
    assert type(short) is type(model)
    assert isinstance(short, type(timm.create_model(name, **SMALL)))


@pytest.mark.parametrize('walks', [False, True])
def test_a_model_with_a_forward_pass_of_its_own(walks: bool) -> None:
    class Own(VisionTransformer):
        def forward_features(self, x: Tensor, **options: Any) -> Tensor:
            if not walks:
                return 2 * super().forward_features(x, **options)
            x = self._pos_embed(self.patch_embed(x))
            for block in self.blocks:
                x = block(x)
            return 2 * self.norm(x)

    model = linear()
    own = Own(depth=2, embed_dim=32, num_heads=2, num_classes=3, dynamic_img_size=True).double()
    linearize(own)
    own.load_state_dict(model.state_dict())
    expected = model.forward_features(image(WIDE))
    assert torch.equal(own.eval().forward_features(image(WIDE)), 2 * expected)


def test_a_block_that_takes_no_size_is_refused() -> None:
    class Wrap(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    for name, argument in (
        ('vit_tiny_patch16_224', 'attn_mask'),
        ('beit_base_patch16_224', 'shared_rel_pos_bias'),
    ):
        model = timm.create_model(name, embed_dim=48, depth=2, num_heads=3)
        model.blocks[1] = Wrap()
        with pytest.raises(ValueError, match=rf'blocks\.1 is a Wrap .* not take {argument}, by'):
            linearize(model)
