"""Blocks under torch.compile: a graph for each kind, the eager model's numbers, no other names."""

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.config as dynamo
import torch.fx.experimental._config as fx_config
from mmengine.config import Config
from torch import nn
from torch._dynamo.testing import CompileCounter

from mmvttt.deploy.compile import compile_blocks, compiling
from mmvttt.errors import UsageError
from mmvttt.models import T5, HViT3, ViT3, ViTAdapter, Vittt
from mmvttt.openmmlab.apis import train as train_api
from mmvttt.openmmlab.apis.train import choose_compile
from mmvttt.openmmlab.engine import CompileHook

from ..configs.reduced import batch_for, build, reduced

PLAIN = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64)
STAGES = dict(embed_dims=(32, 32, 64, 64), depths=(2, 2, 2, 2), num_heads=(1, 2, 2, 2))
OPTIONS = dict(img_size=64, drop_path_rate=0.3)
MODELS = {
    'vittt': lambda: Vittt(PLAIN, **OPTIONS),
    'vit3': lambda: ViT3(PLAIN, **OPTIONS),
    't5': lambda: T5(PLAIN, **OPTIONS),
    'h_vit3': lambda: HViT3(STAGES, drop_path_rate=0.3),
    'vit_adapter': lambda: ViTAdapter(
        dict(type='mmvttt.Vittt', arch=PLAIN, **OPTIONS),
        conv_inplane=8,
        norm_layer=dict(type='GN', num_groups=4),
    ),
}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(y.square().mean() for y in model(x))


def require_same_gradients(one: nn.Module, other: nn.Module, x: torch.Tensor, **close) -> None:
    grads = []
    for model in (one, other):
        torch.manual_seed(1)
        model.zero_grad()
        loss(model, x).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*grads, **close)


def hooked(model: nn.Module, **options) -> tuple[CompileHook, SimpleNamespace]:
    """A hook that has compiled a model, and its runner."""
    hook = CompileHook(options=options)
    runner = SimpleNamespace(model=model, logger=logging.getLogger())
    hook.before_run(runner)
    return hook, runner


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    with compiling():
        yield
    torch.compiler.reset()


# Every block has a rate of its own; one without is another kind. The stages of H-ViT³ are others
# too; an adapter has injectors and extractors besides the blocks of its backbone.
GRAPHS = dict(vittt=2, vit3=2, t5=2, h_vit3=6, vit_adapter=4)


@pytest.mark.parametrize(
    ('name', 'inductor'),
    [
        ('vit_adapter', False),
        # Compiling C++ takes minutes.
        *(pytest.param(name, True, marks=pytest.mark.stress) for name in GRAPHS),
        *(pytest.param(n, False, marks=pytest.mark.stress) for n in GRAPHS if n != 'vit_adapter'),
    ],
)
def test_every_kind_of_block_is_one_graph_with_the_numbers_of_the_eager_model(
    name: str, inductor: bool
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train(not inductor)
    compiled = copy.deepcopy(model)
    counter = CompileCounter()
    compile_blocks(compiled, **({} if inductor else dict(backend=counter, fullgraph=True)))
    # inductor sums in another order.
    close = dict(rtol=1e-3, atol=1e-5) if inductor else {}
    # No side of H-ViT³'s first map is its 32 channels: dynamo takes equal sizes for one.
    for height, width in ((96, 144), (160, 96)):
        x = torch.randn(2, 3, height, width)
        require_same_gradients(compiled, model, x, **close)
    assert list(compiled.state_dict()) == list(model.state_dict())
    if not inductor:
        assert counter.frame_count == GRAPHS[name]
        # An average of the weights is a copy, and runs too.
        copied = copy.deepcopy(compiled).eval()
        torch.testing.assert_close(loss(copied, x), loss(model.eval(), x))


@pytest.mark.parametrize(
    'name',
    [n if n in ('vit3', 'h_vit3') else pytest.param(n, marks=pytest.mark.stress) for n in MODELS],
)
def test_a_whole_backbone_is_one_graph_with_the_numbers_of_the_eager_model(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    compiled, counter = copy.deepcopy(model), CompileCounter()
    compile_blocks(compiled, whole=True, dynamic=False, backend=counter, fullgraph=True)
    require_same_gradients(compiled, model, torch.randn(2, 3, 64, 96))
    assert counter.frame_count == 1


def test_a_run_leaves_the_settings_of_torch_as_they_were() -> None:
    with dynamo.patch(recompile_limit=3), fx_config.patch(use_duck_shape=True):
        hook, runner = hooked(ViT3(PLAIN), backend='eager')
        assert dynamo.recompile_limit >= 64
        assert not fx_config.use_duck_shape
        hook.after_run(runner)
        assert (dynamo.recompile_limit, fx_config.use_duck_shape) == (3, True)


def test_a_backbone_is_compiled_as_a_whole_or_with_checkpoints_by_its_blocks() -> None:
    parts = dict(backbone=Vittt(PLAIN, with_cp=True), head=nn.Linear(1, 1))
    model = nn.ModuleDict(parts | dict(teacher=nn.ModuleDict(dict(backbone=ViT3(PLAIN)))))
    hooked(model, backend='eager', whole=True)
    compiled = [m for m in model.modules() if vars(m).get('_compiled_call_impl')]
    assert compiled == [*model['backbone'].blocks, model['teacher']['backbone']]
    # Without blocks in a backbone, those elsewhere are compiled.
    model = nn.ModuleDict(dict(backbone=nn.Linear(1, 1), head=ViT3(PLAIN)))
    hooked(model, backend='eager', whole=True)
    compiled = [m for m in model.modules() if vars(m).get('_compiled_call_impl')]
    assert compiled == [*model['head'].blocks]


def test_a_training_with_the_hook_has_the_losses_of_one_without(run: Callable) -> None:
    hook = dict(
        type='mmvttt.CompileHook', blocks=['torch.nn.Linear'], options=dict(backend='eager')
    )
    losses = []
    for name, hooks in (('eager', []), ('compiled', [hook])):
        options = {'custom_hooks': hooks, 'train_cfg.max_epochs': 1, 'randomness.seed': 0}
        runner = run('train', work_dir=name, plain=True, cfg_options=options)
        losses.append(runner.message_hub.get_scalar('train/loss').data[0].tolist())
    assert losses[0] == losses[1]
    assert any('_compiled_call_impl' in vars(m) for m in runner.model.modules())


def test_a_model_without_blocks_is_refused(run: Callable) -> None:
    with pytest.raises(TypeError):
        CompileHook(options='max-autotune')
    with pytest.raises(UsageError):
        run('train', work_dir='a', compile=True, cfg_options={'train_cfg.max_epochs': 1})


HOOK = dict(type='mmvttt.CompileHook', options=dict(mode='max-autotune'))


@pytest.mark.parametrize(
    ('wanted', 'device', 'entries', 'options'),
    [
        (True, 'cpu', {}, {}),
        (True, 'cpu', dict(custom_hooks=[HOOK]), dict(mode='max-autotune')),
        (False, 'cuda', dict(custom_hooks=[HOOK]), None),
        (False, 'cuda', dict(compile_blocks=dict()), None),
        (None, 'cuda', dict(compile_blocks=dict(dynamic=False)), dict(dynamic=False)),
        (None, 'cpu', dict(compile_blocks=dict(dynamic=False)), None),
        (None, 'cuda', dict(compile_blocks=False), None),
        (None, 'cuda', {}, None),
        (None, 'cuda', dict(compile_blocks=dict(), strategy=dict()), None),
    ],
)
def test_who_compiles(
    wanted: bool | None, device: str, entries: dict, options: dict | None, monkeypatch
) -> None:
    monkeypatch.setattr(train_api, 'get_device', lambda: device)
    cfg = Config(dict(default_scope='mmdet', **entries))
    choose_compile(cfg, wanted)
    hooks = cfg.get('custom_hooks') or []
    assert [dict(hook.options) for hook in hooks] == ([] if options is None else [options])


def test_a_training_without_a_compiler_or_blocks_runs_eagerly(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('CXX', 'no-such-compiler')
    options = {'train_cfg.max_epochs': 1}
    hook = dict(type='mmvttt.CompileHook', blocks=['torch.nn.Linear'])
    runner = run('train', work_dir='a', plain=True, cfg_options=options | {'custom_hooks': [hook]})
    assert not any('_compiled_call_impl' in vars(m) for m in runner.model.modules())
    monkeypatch.delenv('CXX')
    hook = dict(type='mmvttt.CompileHook', required=False)
    runner = run('train', work_dir='b', plain=True, cfg_options=options | {'custom_hooks': [hook]})
    assert not any('_compiled_call_impl' in vars(m) for m in runner.model.modules())


@pytest.mark.parametrize(
    ('options', 'graphs'),
    [(dict(with_cp=True), 2), (dict(frozen_stages=2), 3), (dict(mixer=dict(mini_batch_size=4)), 2)],
    ids=str,
)
def test_sizes_and_validations_make_no_graph(options: dict, graphs: int) -> None:
    """Checkpointed, frozen, with drop path: the eager model's gradients, and a copy is eager."""
    torch.manual_seed(0)
    model = Vittt(dict(PLAIN, num_layers=3), img_size=64, drop_path_rate=0.3, **options).train()
    compiled, counter = copy.deepcopy(model), CompileCounter()
    hook, runner = hooked(compiled, backend=counter)
    # 64² first: later maps are not square.
    for size in ((64, 64), (48, 80), (80, 48)):
        x = torch.randn(2, 3, *size)
        require_same_gradients(compiled, model, x)
    count = counter.frame_count
    assert count <= graphs
    hook.before_val(runner)
    with torch.no_grad():
        torch.testing.assert_close(loss(compiled.eval(), x), loss(model.eval(), x))
    hook.after_val(runner)
    loss(compiled.train(), x)
    assert counter.frame_count == count


@pytest.mark.stress
@pytest.mark.parametrize(
    'name',
    [
        'deit3_s_linear_in1k_30e',
        't5plus_t_in1k_30e',
        'hvit3_t_mesa_in1k',
        'upernet_vittt_t_160k',
        'upernet_hvit3_t_160k',
        'upernet_dinov3_s_linear_160k',
        'upernet_dinov2_b_160k',
        'mask2former_vittt_s_160k',
        'mask2former_hvit3_t_1x',
        'dino_hvit3_t_1x',
        'maskrcnn_vittt_t_1x',
    ],
)
def test_recipes_compiled_as_they_say_have_the_eager_gradients(name: str) -> None:
    cfg = reduced(name)
    model = build(cfg).train()
    if hasattr(model, 'distilling'):
        model.distilling = True
    models = model, copy.deepcopy(model)
    # Once for both: mixup draws random numbers.
    batch = model.data_preprocessor(batch_for(cfg), True)
    hooked(models[1], **cfg.compile_blocks, backend='aot_eager')
    grads = []
    for m in models:
        torch.manual_seed(1)
        losses = m(**copy.deepcopy(batch), mode='loss')
        m.parse_losses(losses)[0].backward()
        grads.append({n: p.grad for n, p in m.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)
