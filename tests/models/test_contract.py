"""The contract of every registered backbone: one table, one set of tests."""

import copy
import math
import pickle
from itertools import product

import pytest
import torch
from torch import nn

from mmvttt.errors import OptionError, OptionTypeError, UsageError
from mmvttt.models import T5
from mmvttt.models.layers.drop_path import DropPath
from ttt_kernels import _backend, _op

from .building import CASES, MODELS, OWN, PLAIN, STAGES
from .building import build as build_model
from .building import build_case as build

every_backbone = pytest.mark.parametrize('name', CASES)
# Methods of a plain backbone of one's own, each alone; what they change.
HOOKS = {
    'insert_tokens': lambda self, x: (x, dict(marks=torch.ones(1))),
    'shared_extras': lambda self, hw: dict(marks=torch.ones(hw)),
    'run_block': lambda self, index, x, hw, **extras: self.blocks[index](x, hw),
    'to_output': lambda self, x, hw, **extras: x.mean(1),
}


@pytest.mark.parametrize('hook', HOOKS)
def test_one_hook_at_a_time(hook: str) -> None:
    x = torch.randn(1, 3, 32, 48)
    torch.manual_seed(0)
    expected = T5(PLAIN)(x)[0]
    torch.manual_seed(0)
    actual = type('Own', (T5,), {hook: HOOKS[hook]})(PLAIN)(x)[0]
    if hook == 'to_output':
        expected = expected.mean((2, 3))
    torch.testing.assert_close(actual, expected)


@pytest.fixture(autouse=True)
def default_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU numba, which other tests of the models do without."""
    monkeypatch.delenv('TTT_KERNELS_BACKEND', raising=False)


def loss_of(maps: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Not the mean square: after a norm that hardly depends on anything."""
    return sum((m.float() * torch.linspace(-1, 1, m.shape[1])[:, None, None]).mean() for m in maps)


def test_the_table_is_complete() -> None:
    assert set(MODELS) == set(CASES)


SIZES = ((64, 64), (16, 16), (31, 31), (17, 200), (225, 333))


@pytest.mark.parametrize(
    ('name', 'size'), [*product(CASES, SIZES), *product(['HViT3'], [(1, 1), (4, 31)])]
)
def test_maps_of_any_image(name: str, size: tuple[int, int]) -> None:
    model = build(name).eval()
    strides = (4, 8, 16, 32) if name in ('HViT3', 'ViTAdapter') else (16,)
    with torch.no_grad():
        maps = model(torch.randn(2, 3, *size))
    assert isinstance(maps, tuple)
    grids = [tuple(math.ceil(side / stride) for side in size) for stride in strides]
    assert [tuple(m.shape[2:]) for m in maps] == grids
    assert all(m.isfinite().all() for m in maps)
    dims = model.embed_dims if name == 'HViT3' else (64,) * len(strides)
    assert [tuple(m.shape[:2]) for m in maps] == [(2, channels) for channels in dims]


@every_backbone
def test_a_step_reaches_every_parameter_and_lowers_the_loss(name: str) -> None:
    model = build(name).train()
    x = torch.randn(2, 3, 64, 64)
    loss = loss_of(model(x))
    loss.backward()
    # Not "is not 0": offsets of the deformable attention start from zero weights.
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    if name in ('ViT3', 'T5', 'HViT3'):
        assert not [n for n, p in model.named_parameters() if not p.grad.any()]
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 / norm * parameter.grad
    assert loss_of(model(x)) < loss


@every_backbone
def test_one_image_has_the_gradients_of_two_copies(name: str) -> None:
    """Layouts of a batch of 1 are where torch's BatchNorm on the CPU goes wrong (docs/faq.md)."""
    model = build(name).double().train()
    x = torch.randn(1, 3, 96, 80, dtype=torch.float64)
    heads = nn.ModuleList(nn.BatchNorm2d(m.shape[1]) for m in model(x)).double().train()
    named = [*model.named_parameters(), *heads.named_parameters(prefix='head')]
    grads = []
    for copies in (1, 2):
        maps = model(x.expand(copies, -1, -1, -1).clone())
        outs = [head(m) for head, m in zip(heads, maps, strict=True)]
        # A norm leaves the sum of its output as it was: weigh every cell differently.
        weights = [torch.linspace(-1, 1, o[0].numel()).sin().view_as(o[0]) for o in outs]
        loss = sum((o.tanh() * w).mean() for o, w in zip(outs, weights, strict=True))
        grads.append(torch.autograd.grad(loss, [p for _, p in named], allow_unused=True))
    wrong = [
        key
        for (key, _), one, two in zip(named, *grads, strict=True)
        # fp64: what is left is roundings; an order of magnitude per norm on the way.
        if one is not None and not torch.allclose(one, two, rtol=1e-6, atol=1e-10)
    ]
    assert not wrong, f'{len(wrong)} of {len(named)}: {wrong[:5]}'


@every_backbone
def test_evaluation_is_deterministic_and_changes_nothing(name: str) -> None:
    options = dict(drop_path_rate=0.5)
    if name == 'ViTAdapter':
        options['backbone'] = CASES[name]['backbone'] | options
    model = build(name, **options).eval()
    before = copy.deepcopy(model.state_dict())
    attributes = {n: set(vars(module)) for n, module in model.named_modules()}
    x = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        first, _, second = model(x), model(x[..., :32]), model(x)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert attributes == {n: set(vars(module)) for n, module in model.named_modules()}


@every_backbone
def test_state_dict_makes_another_the_same(name: str, tmp_path) -> None:
    model, other = build(name).eval(), build(name, seed=1).eval()
    x = torch.randn(1, 3, 64, 48)
    with torch.no_grad():
        expected = model(x)
        assert not torch.equal(other(x)[-1], expected[-1])
        torch.save(model.state_dict(), tmp_path / 'weights.pth')
        other.load_state_dict(torch.load(tmp_path / 'weights.pth', weights_only=True))
        for a, b in zip(other(x), expected, strict=True):
            assert torch.equal(a, b)
        # The moving average of the weights copies the whole model.
        for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for a, b in zip(same(x), expected, strict=True):
                assert torch.equal(a, b)


@every_backbone
def test_neither_layout_nor_batch_of_the_images_matters(name: str) -> None:
    model = build(name).eval()
    x = torch.randn(2, 3, 64, 80)
    with torch.no_grad():
        usual = model(x)
        channels_last = model(x.to(memory_format=torch.channels_last))
        strided = model(torch.randn(2, 3, 64, 160).copy_(x.repeat_interleave(2, 3))[..., ::2])
        alone = [torch.cat(maps) for maps in zip(*(model(i[None]) for i in x), strict=True)]
    # fp32; other layouts take other convolutions, whose sums have another order.
    atol = {'Vittt': 2e-5, 'ViT3': 2e-5, 'HViT3': 5e-5}.get(name, 1e-4)
    for a, *others in zip(usual, channels_last, strided, alone, strict=True):
        for other in others:
            torch.testing.assert_close(other, a, rtol=0, atol=atol)


@every_backbone
def test_gradients_of_each_image(name: str) -> None:
    """By vmap, as in differentially private training, and one after the other."""
    model = build(name).double().eval()
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def loss(weights: dict, x: torch.Tensor) -> torch.Tensor:
        return sum(y.sin().sum() for y in torch.func.functional_call(model, weights, (x[None],)))

    gradient = torch.func.grad(loss)
    actual = torch.func.vmap(gradient, (None, 0))(weights, images)
    for i, image in enumerate(images):
        for n, expected in gradient(weights, image).items():
            # fp64; timm resizes position embeddings in fp32.
            rtol = 1e-5 if n.endswith('pos_embed') else 1e-8
            torch.testing.assert_close(actual[n][i], expected, rtol=rtol, atol=rtol, msg=n)


# Layers of some parameters.
LAYERS = {
    'Vittt': {'patch_embed.proj.weight': 0, 'pos_embed': 0, 'blocks.2.mixer.w0': 3},
    'HViT3': {
        'stem.0.conv.weight': 0,
        'stages.0.blocks.0.mixer.w1': 1,
        'stages.1.downsample.widen.weight': 2,
        'stages.1.blocks.1.cpe.bias': 3,
        'norms.0.weight': 6,
    },
    'ViTAdapter': {'backbone.pos_embed': 0, 'backbone.blocks.2.norm1.bias': 3, 'level_embed': 5},
}


@every_backbone
def test_layers_of_the_learning_rate(name: str) -> None:
    """mmpretrain's protocol: every parameter has a layer, from 0 at the image to the last."""
    model = build(name)
    names = {n for n, _ in model.named_parameters()}
    depths = {n: model.get_layer_depth(f'backbone.{n}', 'backbone.') for n in names}
    (total,) = {total for _, total in depths.values()}
    layers = {n: layer for n, (layer, _) in depths.items()}
    assert {0, 1, total - 2} <= set(layers.values()) <= set(range(total))
    assert LAYERS.get(name, {}).items() <= layers.items()
    assert model.get_layer_depth('head.fc.weight', 'backbone.')[0] == total - 1
    assert getattr(model, 'no_weight_decay', set)() <= names


@pytest.mark.parametrize('out_type', ['featmap', 'avg_featmap'])
@pytest.mark.parametrize('frozen', [-1, 0, 3, 4])
@pytest.mark.parametrize('name', [*OWN, 'TimmViT'])
def test_frozen_stages(name: str, frozen: int, out_type: str) -> None:
    model = build(name, frozen_stages=frozen, out_type=out_type).train()
    for n, parameter in model.named_parameters():
        part, number = n.split('.')[:2] if '.' in n else (n, '')
        numbered = int(number) + 1 if part in ('blocks', 'stages', 'norms') else 0
        assert parameter.requires_grad is ((4 if part == 'norm' else numbered) > frozen), n
    first, parts = (
        (model.stem, model.stages) if name == 'HViT3' else (model.patch_embed, model.blocks)
    )
    assert [m.training for m in (first, *parts)] == [i > frozen for i in range(5)]


def test_parts_of_a_subclass_come_after_the_blocks() -> None:
    """They learn at the full rate, are not frozen with the embedding, and a matrix decays."""

    class Own(T5):
        def __init__(self, **options) -> None:
            super().__init__(**options)
            self.mix, self.tail = nn.Parameter(torch.zeros(2, 2)), nn.Linear(2, 2)

    model = Own(arch=PLAIN, frozen_stages=0).train()
    assert {model.get_layer_depth(n)[0] for n in ('mix', 'tail.weight', 'norm.weight')} == {5}
    assert model.mix.requires_grad
    assert model.tail.training
    assert 'mix' not in model.no_weight_decay()
    assert not any(p.requires_grad for p in Own(arch=PLAIN, frozen_stages=4).train().parameters())


@every_backbone
def test_the_epsilon_of_all_norms(name: str) -> None:
    """The authors' of each: H-ViT³ and DINOv3 have torch's default."""
    expected = 1e-5 if name in ('HViT3', 'TimmViT') else 1e-6
    assert {m.eps for m in build(name).modules() if isinstance(m, nn.LayerNorm)} == {expected}


@pytest.mark.parametrize('name', OWN)
def test_drop_path_rises_linearly(name: str) -> None:
    blocks = [
        m
        for n, m in build(name, drop_path_rate=0.4).named_modules()
        if n.rpartition('.')[0].endswith('blocks')
    ]
    expected = [0.4 * i / (len(blocks) - 1) for i in range(len(blocks))]
    assert [block.drop_path.drop_prob for block in blocks] == pytest.approx(expected)


@pytest.mark.parametrize('name', [*OWN, 'ViTAdapter'])
def test_dropped_branches_learn_nothing(name: str) -> None:
    model = build(name).train()
    for module in model.modules():
        if isinstance(module, DropPath):
            module.drop_prob = 1 - 1e-6
    loss_of(model(torch.randn(2, 3, 64, 64))).backward()
    learned = {part for n, p in model.named_parameters() if p.grad.any() for part in n.split('.')}
    assert learned & {'cpe', 'conv2d', 'patch_embed'}
    assert not learned & {'mixer', 'mlp', 'ffn'}


@pytest.mark.parametrize('name', [*OWN[:3], 'TimmViT'])
def test_pooled_is_the_mean_of_the_map(name: str) -> None:
    x = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        (pooled,) = build(name, out_type='avg_featmap').eval()(x)
        torch.testing.assert_close(pooled, build(name).eval()(x)[0].mean((2, 3)))


def offload(model: nn.Module) -> None:
    """accelerate's sequential offload: each module's weights come with its call, and go again."""

    def leave(module: nn.Module, *_: object) -> None:
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(weight.to('meta'), False)

    for module in model.modules():
        weights = {n: p for n, p in module._parameters.items() if p is not None}
        leave(module)
        module.register_forward_pre_hook(lambda m, _, w=weights: m._parameters.update(w))
        module.register_forward_hook(leave)


DESIGN = dict(type='mmvttt.TTTMixer', inner='MLP', epochs=2, step='dynamic', qk_affine=True)


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        *((name, {}) for name in (*OWN, 'TimmViT')),
        ('T5', dict(mixer=DESIGN)),
        # It calls methods of its backbone: a position embedding would stay away.
        ('ViTAdapter', dict(backbone=CASES['ViT3'])),
    ],
)
def test_parameters_are_read_in_the_module_that_owns_them(name: str, options: dict) -> None:
    model = build(name, **options).eval()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(image)
        offload(model)
        assert all(torch.equal(*pair) for pair in zip(model(image), expected, strict=True))


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning', 'ignore::DeprecationWarning')
@every_backbone
def test_a_traced_model_computes_the_same(name: str) -> None:
    """torch.jit.trace, and the counters of FLOPs that look at a model through it."""
    model = build(name).eval()
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        traced = torch.jit.trace(model, torch.randn(1, 3, 64, 96), check_trace=False)
        for actual, expected in zip(traced(image), model(image), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    analysis = pytest.importorskip('mmengine.analysis')
    counted = analysis.get_model_complexity_info(
        model, (3, 64, 96), show_table=False, show_arch=False
    )
    assert counted['params'] == sum(p.numel() for p in model.parameters())
    assert counted['flops'] > 0


@every_backbone
@pytest.mark.parametrize('shape', [(1, 4, 32, 32), (3, 32, 32), (1, 3, 0, 32)])
def test_a_wrong_image_is_named(name: str, shape: tuple[int, ...]) -> None:
    model = build(name).eval()
    with pytest.raises(OptionError) as error:
        model(torch.zeros(shape))
    assert str(shape) in str(error.value)
    with pytest.raises(OptionTypeError):
        model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    if name in OWN[:3]:
        with pytest.raises(OptionError, match='15×40'):
            model(torch.zeros(1, 3, 15, 40))


def ttt(**options) -> dict:
    return dict(mixer=dict(type='TTTMixer', **{'inner': 'FC', **options}))


# Options that each of these backbones refuses.
BAD = {
    OWN: [
        *(dict(arch=arch) for arch in ('huge', dict(embed_dims=64))),
        *(dict(out_indices=indices) for indices in (7, (1, 1))),
        dict(drop_path_rate=1.0),
    ],
    (*OWN, 'TimmViT'): [dict(out_type='raw'), dict(frozen_stages=5)],
    OWN[:3]: [dict(arch=dict(PLAIN, num_heads=5))],
    ('Vittt',): [
        *(dict(design='conv3d'), dict(design='dual', mixer='ViT3Mixer'), dict(residual='none')),
        dict(cls_mode='sum'),
        *(dict(mixer=dict(o)) for o in (dict(learnable_states=3), dict(directions=('up',)))),
    ],
    ('ViT3',): [
        *(dict(mixer=mixer) for mixer in (3, nn.Linear(2, 2), dict(type='foreign.NoSuch'))),
        *(dict(mixer=mixer) for mixer in (dict(type=None), dict(type='ViT3Mixer', gain=3))),
        *(ttt(inner=dict(type=inner)) for inner in ('my.Tanh2', nn.Linear)),
        *(ttt(inner=inner) for inner in ({}, dict(type='MLP', depth=1))),
        ttt(inner=dict(type='MLP', residual='all')),
        ttt(inner=dict(type='MLP', ratio=2, identity_init=True)),
        ttt(inner='SoftmaxAttention', loss='l2'),
        *(ttt(loss=loss) for loss in ('huber', 3)),
        *(ttt(key_norm=norm) for norm in ('batch', nn.LayerNorm(16))),
        *(ttt(step=step) for step in (0, 'fast')),
        *(ttt(locality='conv'), ttt(neighborhood=4), ttt(epochs=0)),
        # No op does this training.
        ttt(epochs=2, backend='reference'),
    ],
    ('HViT3',): [
        *(
            dict(arch=dict(STAGES, **o))
            for o in (dict(depths=(1, 1)), dict(num_heads=(1, 2, 5, 4)))
        ),
        dict(out_type='avg_featmap', out_indices=(2, 3)),
    ],
    ('TimmViT',): [
        dict(model='beit_base_patch16_224'),
        dict(model='vit_base_patch16_siglip_224', out_type='cls_token'),
    ],
    ('ViTAdapter',): [
        *(dict(task='cls'), dict(task='seg', interaction_indexes=[[0, 3]])),
        dict(deform_ratio=0.05),
        *(
            dict(interaction_indexes=groups)
            for groups in ([[0, 1], [1, 3]], [[0, 1], [2, 4]], [[0, 1], [3, 3]], [[0, 1, 3]], [])
        ),
        dict(out_indices=()),
        *(dict(backbone=nn.Linear(3, 3)), dict(backbone=CASES['ViT3'] | dict(patch_size=14))),
    ],
}


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        pytest.param(name, options, id=f'{name}-{options}')
        for names, rows in BAD.items()
        for options in rows
        for name in names
    ],
)
def test_a_bad_option_is_named(name: str, options: dict) -> None:
    with pytest.raises(UsageError) as error:
        build(name, **options)
    while isinstance(value := [*options.values()][-1], dict) and value:
        options = value
    assert any(str(word) in str(error.value) for word in (*options, value))


REFERENCE = dict(backend='reference')
# Models, and the options by which all of their ops run the reference.
ON_THE_REFERENCE = {
    **{name: (CASES[name], dict(mixer=REFERENCE)) for name in ('Vittt', 'ViT3', 'HViT3', 'T5')},
    **{
        inner: (CASES['ViT3'] | dict(mixer=mixer), dict(mixer=mixer | REFERENCE))
        for inner in ('GatedFC', 'DWConv', 'MLP')
        for mixer in [dict(type='TTTMixer', inner=inner)]
    },
    'ViTAdapter': (
        CASES['ViTAdapter'] | dict(backbone=CASES['Vittt'] | dict(mixer=REFERENCE)),
        dict(deform_backend='reference'),
    ),
}


@pytest.mark.parametrize('name', ON_THE_REFERENCE)
def test_a_config_chooses_the_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names Triton, which runs nothing on a CPU, so every op needs the option."""
    monkeypatch.setenv(_backend.VARIABLE, 'triton')
    for op in _op.OPS.values():
        # Of calls in another environment.
        op.plans.clear()
    config, options = ON_THE_REFERENCE[name]
    image = torch.randn(2, 3, 32, 32)
    with pytest.raises(RuntimeError, match='cannot run here'):
        build_model(config).eval()(image)
    assert build_model(config | options).eval()(image)
