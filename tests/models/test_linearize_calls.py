"""Outputs of a linearized model depend on the call alone: threads, blocks, recomputation."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from timm.layers import set_reentrant_ckpt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmvttt.errors import OptionError
from mmvttt.models.linearize import linearize

from .building import shaken
from .test_linearize import BEIT, MODELS, ROTARY, SOURCES, VIT, build, noise, outputs

# Equally many patches.
WIDE, HIGH = (48, 80), (80, 48)


def linear(name: str = VIT, **options) -> nn.Module:
    model = build(name)
    linearize(model, **options)
    return shaken(model)


def image(size: tuple[int, int]) -> Tensor:
    return noise(*size, batch=1)


@pytest.mark.parametrize('name', [VIT, ROTARY])
def test_a_block_outside_of_a_call_is_refused(name: str) -> None:
    """Tokens of one image, after another image of as many: no size is left behind."""
    model = linear(name)
    tokens: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    model(image(WIDE))
    model(image(HIGH))
    model.patch_embed(image(HIGH))
    for block in (model.blocks[0], model.blocks[0].attn):
        with pytest.raises(OptionError):
            block(tokens[0])


@pytest.mark.parametrize(
    ('name', 'reentrant'),
    [
        *((name, again) for name in (VIT, *({'SD3'} & SOURCES.keys())) for again in (False, True)),
        # timm passes rotary positions by name, which reentrant checkpointing does not take.
        (ROTARY, False),
    ],
)
def test_two_images_in_flight_with_checkpointing(name: str, reentrant: bool) -> None:
    """Both forward passes, then both backward passes, with as many tokens of other maps."""
    model = SOURCES[name].build().train()
    replaced = linearize(model, [1]).replaced[0]
    calls: list[nn.Module] = []
    model.get_submodule(replaced).register_forward_pre_hook(lambda module, _: calls.append(module))
    grads = []
    for checkpointing in (False, True):
        if checkpointing and name == 'SD3':
            model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=reentrant))
        elif checkpointing:
            model.set_grad_checkpointing()
        model.zero_grad()
        set_reentrant_ckpt(reentrant)
        try:
            for out in [model(**SOURCES[name].inputs(model, number)) for number in range(2)]:
                (out if isinstance(out, Tensor) else out.sample).square().sum().backward()
        finally:
            set_reentrant_ckpt(False)
        grads.append({n: p.grad for n, p in model.named_parameters()})
    # Twice, then twice with a recomputation each.
    assert len(calls) == 2 + 4
    for n, grad in grads[0].items():
        # Reentrant checkpointing sums a shared gradient in another order: fp64.
        torch.testing.assert_close(grads[1][n], grad, rtol=1e-10, atol=1e-10 * reentrant, msg=n)


def test_intermediates_are_of_the_call() -> None:
    model = linear(ROTARY, where=[0])
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
    model = build(VIT)
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


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return outputs(model, inputs)[0]


THREADED = (VIT, ROTARY, BEIT, 'vit_relpos_small_patch16_224')


@pytest.mark.parametrize('partly', [False, True])
@pytest.mark.parametrize('name', [n for n in SOURCES if n in THREADED or n not in MODELS])
def test_threads_and_copies(name: str, partly: bool) -> None:
    """Every thread stops before each LayerNorm until all are there."""
    model = SOURCES[name].build()
    names = linearize(copy.deepcopy(model)).replaced
    linearize(model, names[-1] if partly else 'all')
    calls = [SOURCES[name].inputs(model, number) for number in range(4)]
    expected = [output(model, call) for call in calls]
    assert not torch.equal(expected[0], expected[2])
    together = threading.Barrier(len(calls), timeout=60)

    def meet(module: nn.Module, _: object) -> None:
        if isinstance(module, nn.LayerNorm):
            together.wait()

    handle = nn.modules.module.register_module_forward_pre_hook(meet)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            actual = list(pool.map(lambda call: output(model, call), calls))
    finally:
        handle.remove()
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    assert torch.equal(output(copy.copy(model), calls[1]), expected[1])
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    output(model, calls[0])
    for other in others:
        assert torch.equal(output(other, calls[1]), expected[1])


@pytest.mark.parametrize('name', [VIT, ROTARY])
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
    assert isinstance(short, type(build(name)))


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
