"""Outputs of a linearized model depend on the call alone: threads, blocks, recomputation."""

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_reentrant_ckpt
from timm.models import checkpoint_seq
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

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


def test_the_forward_of_the_class_is_refused() -> None:
    model = linear()
    with pytest.raises(ValueError, match='call the model'):
        type(model).forward_features(model, image(WIDE))


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'vit_small_patch16_dinov3'])
def test_a_replica_runs_its_own_weights(name: str) -> None:
    """Does as `torch.nn.parallel.replicate` for each GPU, with halved weights."""
    model = linear(name)
    halved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in halved.parameters():
            parameter *= 0.5
    modules = list(model.modules())
    replicas = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in replicas.items():
        for child, part in module._modules.items():
            setattr(replica, child, None if part is None else replicas[part])
        for own, parameter in module._parameters.items():
            setattr(replica, own, None if parameter is None else parameter.detach() * 0.5)
    assert torch.equal(replicas[model](image(WIDE)), halved(image(WIDE)))


@pytest.mark.parametrize('kind', ['forward_pre', 'forward', 'full_backward'])
def test_hooks_of_the_blocks_as_a_whole(kind: str) -> None:
    """timm calls the container of a VisionTransformer's blocks; counters of FLOPs hook them all."""
    model = linear()
    expected = model(image(WIDE))
    calls: list[nn.Module] = []
    hook = getattr(model.blocks, f'register_{kind}_hook')(lambda m, *_: calls.append(m))
    out = model(image(WIDE).requires_grad_())
    out.sum().backward()
    assert torch.equal(out, expected)
    assert len(calls) == 1
    hook.remove()
    model(image(WIDE))
    assert len(calls) == 1


@pytest.mark.parametrize('in_place', [False, True])
def test_blocks_compiled_as_a_whole_are_refused(in_place: bool) -> None:
    model = linear()
    if in_place:
        model.blocks.compile(backend='eager')
    else:
        model.blocks = torch.compile(model.blocks, backend='eager')
    with pytest.raises(ValueError, match='compile or wrap the model, or every block'):
        model(image(WIDE))


def test_a_call_inside_of_a_call() -> None:
    model = linear()
    expected = model(image(WIDE))
    inside: list[Tensor] = []

    def call(*_: object) -> None:
        if not inside:
            inside.append(torch.empty(0))
            inside.append(model(image(HIGH)))

    for module in (model.pos_drop, model.blocks[0].norm1):
        handle = module.register_forward_pre_hook(call)
        assert torch.equal(model(image(WIDE)), expected)
        handle.remove()
        assert torch.equal(inside[1], model(image(HIGH)))
        inside.clear()


@pytest.mark.parametrize(
    ('name', 'reentrant', 'every'),
    [
        ('vit_tiny_patch16_224', False, 1),
        ('vit_tiny_patch16_224', True, 1),
        ('vit_tiny_patch16_224', False, 2),
        ('vit_small_patch16_dinov3', False, 1),
    ],
)
def test_two_images_in_flight_with_checkpointing(
    name: str, reentrant: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forward passes, then both backward passes, with as many tokens of other maps."""
    together = partial(checkpoint_seq, every=every)
    monkeypatch.setattr(timm.models.vision_transformer, 'checkpoint_seq', together)
    model = linear(name, where=[1]).train()
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
    with pytest.raises(ValueError, match='takes no mask'):
        vit.get_intermediate_layers(image(HIGH), 1, attn_mask=torch.zeros(16, 16))


class Doubled(VisionTransformer):
    def forward_features(self, x: Tensor, **kwargs) -> Tensor:
        self.seen = super().forward_features(x, **kwargs) * 2
        return self.seen


class Whole(VisionTransformer):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self._pos_embed(self.patch_embed(x))))


def test_methods_that_are_not_those_of_timm() -> None:
    replaced = timm.create_model('vit_tiny_patch16_224', **SMALL)
    replaced.forward_features = lambda x: x
    with pytest.raises(ValueError, match=r"VisionTransformer\.forward_features is not timm's"):
        linearize(replaced)
    with pytest.raises(ValueError, match=r"Doubled\.forward_features is not timm's"):
        linearize(Doubled(**SMALL))
    assert not hasattr(replaced, 'linearize_options')
    whole = shaken(Whole(**SMALL, img_size=32).double())
    linearize(whole)
    with pytest.raises(ValueError, match=r'takes the tokens from `self\.forward_features`'):
        whole(image((32, 32)))


@pytest.mark.parametrize('change', ['prune', 'resize', 'classes'])
def test_what_timm_changes_on_a_model(change: str) -> None:
    model = linear()
    expected = model.forward_intermediates(image(WIDE), [0], intermediates_only=True)[0]
    weights = model.state_dict()
    if change == 'prune':
        model.prune_intermediate_layers([0])
        assert len(model.blocks) == 1
    elif change == 'resize':
        model.set_input_size(WIDE)
        assert model.patch_embed.grid_size == (3, 5)
    else:
        model.reset_classifier(7)
        assert model(image(WIDE)).shape == (1, 7)
    actual = model.forward_intermediates(image(WIDE), [0], intermediates_only=True)[0]
    # The position embedding is resized once more, or not: fp64.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    assert all(n in weights for n in model.state_dict() if not n.startswith('head'))


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
