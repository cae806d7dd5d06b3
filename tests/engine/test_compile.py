"""Blocks under torch.compile: a graph for each kind, the eager model's numbers, no other names."""

import copy
from collections.abc import Callable

import pytest
import torch
from mmengine.config import Config
from torch import nn
from torch._dynamo.testing import CompileCounter

from mmvttt.errors import UsageError
from mmvttt.models import T5, HViT3, ViT3, ViTAdapter, Vittt
from mmvttt.openmmlab.apis.train import enable_compile
from mmvttt.openmmlab.engine import CompileHook, compile_blocks

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


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    limit = torch.compiler.config.recompile_limit
    yield
    torch.compiler.config.recompile_limit = limit
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
        for m in (model, compiled):
            torch.manual_seed(1)
            m.zero_grad()
            loss(m, x).backward()
        assert list(compiled.state_dict()) == list(model.state_dict())
        grads = [{n: p.grad for n, p in m.named_parameters()} for m in (compiled, model)]
        torch.testing.assert_close(*grads, **close)
    if not inductor:
        assert counter.frame_count == GRAPHS[name]
        # An average of the weights is a copy, and runs too.
        copied = copy.deepcopy(compiled).eval()
        torch.testing.assert_close(loss(copied, x), loss(model.eval(), x))


def test_a_training_with_the_hook_has_the_losses_of_one_without(run: Callable) -> None:
    hook = dict(type='mmvttt.CompileHook', names=['Linear'], options=dict(backend='eager'))
    losses = []
    for name, hooks in (('eager', []), ('compiled', [hook])):
        options = {'custom_hooks': hooks, 'train_cfg.max_epochs': 1, 'randomness.seed': 0}
        runner = run('train', work_dir=name, plain=True, cfg_options=options)
        losses.append(runner.message_hub.get_scalar('train/loss').data[0].tolist())
    assert losses[0] == losses[1]
    assert any('_compiled_call_impl' in vars(m) for m in runner.model.modules())


def test_a_model_without_blocks_is_refused(run: Callable) -> None:
    with pytest.raises(UsageError, match='TinyModel has a name that ends in Block'):
        run('train', work_dir='a', compile=True, cfg_options={'train_cfg.max_epochs': 1})


def test_a_hook_of_the_config_stays() -> None:
    hook = dict(type='mmvttt.CompileHook', options=dict(mode='max-autotune'))
    for hooks, expected in (([], [dict(type='mmvttt.CompileHook')]), ([hook], [hook])):
        cfg = Config(dict(custom_hooks=hooks, default_scope='mmdet'))
        enable_compile(cfg)
        assert cfg.custom_hooks == expected


def test_options_are_a_dict() -> None:
    with pytest.raises(TypeError, match=r"options='max-autotune'.*dynamic"):
        CompileHook(options='max-autotune')
