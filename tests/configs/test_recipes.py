"""Every recipe in tables: rates by step and by tensor, decay, precision, averages, depth, starts.

The values are written out here a second time, from the papers and the authors' code: see
docs/fidelity.md for the sources.
"""

import re
from collections import Counter
from fnmatch import fnmatch
from functools import cache
from typing import NamedTuple

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from torch import nn

from mmvttt.models.layers.drop_path import DropPath
from mmvttt.openmmlab import config as configs
from mmvttt.openmmlab.registry import DATA_SAMPLERS, MODELS, PARAM_SCHEDULERS
from mmvttt.openmmlab.reliability.weights import remove_checkpoints

# Worked examples on small sets; heads with the toolboxes' own recipes; generation.
OTHERS = re.compile(
    'demo|finetune|pennfudan|pedestrians|camvid|dino_|mask2former|digits|cifar10|distil|dit3|dit5|sd35m'
)
NAMES = [name for name in configs.config_names() if not OTHERS.search(name)]
load_config = cache(configs.load_config)
FP32, AMP = 'OptimWrapper', 'mmvttt.AmpOptimWrapper'


class Recipe(NamedTuple):
    """Expected values of a config."""

    lr: float  # at `images`, before schedule and layers
    decay: float  # of weights, where there is one
    layers: float  # factor of the rate from a layer to the one before
    spared: str  # what has no weight decay, a key of SPARED
    images: int  # of a step that `lr` is meant for
    scaled: bool  # whether the rate follows the real number by itself
    precision: str  # type of the optimizer's wrapper
    average: str | None  # hook that averages the weights
    norms: str | None  # of the backbone, besides LayerNorm
    clip: float | None  # largest norm of the gradient
    schedule: str  # a key of RATES


def classifier(average: str | None = None, norms: str | None = None) -> Recipe:
    """ViT³ and H-ViT³ on ImageNet."""
    return Recipe(4e-3, 0.05, 1.0, 'vectors', 4096, True, AMP, average, norms, 5.0, '300 epochs')


def detector(schedule: str) -> Recipe:
    """H-ViT³ with Mask R-CNN."""
    return Recipe(2e-4, 0.05, 1.0, 'norms', 32, True, AMP, None, 'BatchNorm2d', None, schedule)


def segmentor(lr: float, layers: float) -> Recipe:
    """A plain backbone in a ViT-Adapter with UperNet."""
    return Recipe(
        lr, 0.01, layers, 'vectors', 16, False, FP32, None, 'SyncBatchNorm', None, '160k steps'
    )


ADAPTED = Recipe(
    1e-4, 0.05, 0.85, 'vectors', 16, False, FP32, None, 'SyncBatchNorm', None, '12 epochs'
)
UPERNET = segmentor(6e-5, 1.0)._replace(spared="the backbone's norms", norms='BatchNorm2d')
INHERITED = Recipe(4e-5, 1e-8, 1.0, 'vectors', 1024, False, FP32, None, None, None, '30 epochs')
RECIPES = {
    'vittt_?_in1k': classifier()._replace(lr=1e-3, images=1024, scaled=False, precision=FP32),
    'vit3_?_in1k': classifier(),
    'hvit3_?_in1k': classifier('mmvttt.EMAHook', 'BatchNorm2d'),
    'hvit3_?_mesa_in1k': classifier('mmvttt.MESAHook', 'BatchNorm2d'),
    't5*_in1k_30e': INHERITED,
    'deit3_s_linear_in1k_30e': INHERITED,
    'maskrcnn_dinov*_1x': ADAPTED,
    'maskrcnn_vi*_1x': ADAPTED,
    'maskrcnn_t5_?_1x': ADAPTED,
    'maskrcnn_hvit3_?_1x': detector('12 epochs, long warm-up'),
    'fasterrcnn_vittt_?_1x': ADAPTED,
    'fasterrcnn_hvit3_t_1x': detector('12 epochs, long warm-up'),
    'maskrcnn_hvit3_?_3x': detector('36 epochs'),
    'upernet_vi*_t_160k': segmentor(12e-5, 0.95),
    'upernet_vi*_s_160k': segmentor(6e-5, 0.85),
    'upernet_vi*_b_160k': segmentor(6e-5, 0.8),
    'upernet_t5_t_160k': segmentor(12e-5, 0.95),
    'upernet_t5_s_160k': segmentor(6e-5, 0.85),
    'upernet_dinov3_s_*160k': segmentor(6e-5, 0.85),
    'upernet_dinov2_b_*160k': segmentor(6e-5, 0.8),
    'upernet_hvit3_t_160k': UPERNET._replace(precision=AMP),
    'upernet_hvit3_[sb]_160k': UPERNET,
}
# By schedule: steps in an epoch, and the rate at some steps, as a part of the full one: the first
# two, the end of the warm-up, the middle, where it changes, the last.
RATES = {
    '300 epochs': (
        20,
        {0: 1e-3, 1: 3.4975e-3, 400: 0.98918307, 3000: 0.505, 5999: 0.0100000679},
    ),
    '30 epochs': (
        50,
        {0: 1e-3, 50: 0.2008, 249: 0.8002, 250: 0.93368257, 750: 0.505, 1499: 0.012711662},
    ),
    '12 epochs': (
        600,
        {0: 1e-3, 1: 3.0020040e-3, 499: 1, 3600: 1, 4800: 0.1, 6600: 0.01, 7199: 0.01},
    ),
    '12 epochs, long warm-up': (
        1100,
        {0: 1e-3, 1: 2e-3, 999: 1, 6600: 1, 8800: 0.1, 12100: 0.01, 13199: 0.01},
    ),
    '36 epochs': (
        1100,
        {0: 1e-3, 1: 2e-3, 999: 1, 19800: 1, 29700: 0.1, 36300: 0.01, 39599: 0.01},
    ),
    '160k steps': (
        None,
        {0: 1e-6, 1: 6.6811074e-4, 1499: 1, 80000: 0.50472874, 159999: 0},
    ),
}
# Stochastic depth, of the sizes t, s and b.
DROP_PATHS = {
    'vittt_?_in1k': (0.1, 0.1, 0.1),
    'vit3_?_in1k': (0.0, 0.1, 0.4),
    'hvit3_?_in1k': (0.2, 0.4, 0.6),
    'hvit3_?_mesa_in1k': (0.2, 0.4, 0.6),
    't5*_in1k_30e': (0.0, 0.0),
    'maskrcnn_vi*_?_1x': (0.1, 0.2, 0.3),
    'maskrcnn_t5_?_1x': (0.1, 0.2),
    'maskrcnn_hvit3_?_1x': (0.1, 0.1, 0.1),
    'maskrcnn_hvit3_?_3x': (0.3, 0.4, 0.6),
    'upernet_vi*_?_160k': (0.1, 0.2, 0.3),
    'upernet_t5_?_160k': (0.1, 0.2),
    'upernet_hvit3_?_160k': (0.2, 0.4, 0.5),
}
VECTORS = re.compile(
    r'(^|\.)(pos_embed|level_embed|(cls|reg)_token|token_scale|b0|ln_weight|ln_bias)$'
)
NORMS = re.compile(r'(^|\.)(norm\d?|norms\.\d|bn)\.(weight|bias)$')
SPARED = {
    'vectors': lambda name, p: p.ndim <= 1 or bool(VECTORS.search(name)),
    'norms': lambda name, _: bool(NORMS.search(name)),
    "the backbone's norms": lambda name, _: bool(re.match('backbone.*' + NORMS.pattern, name)),
}
# New parameters of T⁵ and of a linearized model, at 20 times the rate.
NEW = re.compile(r'(mixer|attn)\.(inner\.w\d|[qk]_conv\.(weight|bias))$')


def recipe_of(name: str) -> Recipe:
    (recipe,) = [recipe for pattern, recipe in RECIPES.items() if fnmatch(name, pattern)]
    return recipe


def one_of_each() -> list[str]:
    return [next(n for n in sorted(NAMES, key=len) if fnmatch(n, p)) for p in RECIPES] + [
        'maskrcnn_dinov3_s_linear_1x'
    ]


@cache
def built(name: str) -> tuple[Config, nn.Module]:
    """A config and its model, without memory for the weights."""
    cfg = load_config(name)
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        return cfg, MODELS.build(cfg.model)


@pytest.mark.parametrize('name', NAMES)
def test_optimizer_precision_and_averages(name: str) -> None:
    cfg, recipe = load_config(name), recipe_of(name)
    wrapper, optimizer = cfg.optim_wrapper, cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr) == ('AdamW', recipe.lr)
    assert tuple(optimizer.get('betas', (0.9, 0.999))) == (0.9, 0.999)
    assert optimizer.get('eps', 1e-8) == 1e-8
    assert wrapper.get('type', FP32) == recipe.precision
    assert (wrapper.get('clip_grad') or {}).get('max_norm') == recipe.clip
    assert cfg.auto_scale_lr.base_batch_size == recipe.images
    assert cfg.auto_scale_lr.get('enable', False) == recipe.scaled
    hooks = [h for h in cfg.get('custom_hooks') or [] if h.type == recipe.average]
    assert len(hooks) == (recipe.average is not None)
    # As the authors' main.py, and mmengine's default in their detection and segmentation.
    broadcasts = 'mmvttt.BroadcastBuffersHook' in [h.type for h in cfg.get('custom_hooks') or []]
    assert broadcasts == bool(re.match('hvit3.*in1k', name))
    for hook in hooks:
        # MESAHook's are its defaults.
        assert hook.get('decay', 0.9996) == 0.9996
        assert hook.get('base_batch_size', 4096) == 4096


@pytest.mark.parametrize('pattern', DROP_PATHS)
def test_stochastic_depth(pattern: str) -> None:
    for name in (n for n in NAMES if fnmatch(n, pattern)):
        backbone = load_config(name).model.backbone
        size = 'tsb'.index(re.search(r'_([tsb])_', name)[1])
        rate = backbone.get('backbone', backbone).get('drop_path_rate', 0.0)
        assert rate == DROP_PATHS[pattern][size], name


def test_an_adapter_drops_as_its_backbone_does() -> None:
    interactions = built('upernet_vittt_s_160k')[1].backbone.interactions
    assert {m.drop_prob for m in interactions.modules() if isinstance(m, DropPath)} == {0.2}


def transforms(name: str) -> dict[str, ConfigDict]:
    """The training pipeline of a config by type."""
    return {step.type: step for step in load_config(name).train_dataloader.dataset.pipeline}


def test_augmentation_of_imagenet() -> None:
    """vision-ttt App. D, ViT³ Sec. 5.1: DeiT's; T⁵ repeats it."""
    cfg = load_config('vittt_s_in1k')
    assert cfg.train_dataloader.batch_size * 8 == 1024
    assert {'RandomResizedCrop', 'RandAugment', 'RandomErasing'} <= set(transforms('vittt_s_in1k'))
    augments = [(a.type, a.alpha) for a in cfg.model.train_cfg.augments]
    assert augments == [('Mixup', 0.8), ('CutMix', 1.0)]
    assert cfg.model.head.loss.label_smooth_val == 0.1
    # A third of the images, three times each: facts of DeiT's sampler, on 12 images.
    repeated = load_config('t5_t_in1k_30e').train_dataloader.sampler
    init_default_scope('mmpretrain')
    sampler = DATA_SAMPLERS.build(repeated, default_args=dict(dataset=range(12)))
    assert sorted(Counter(sampler).values()) == [3, 3, 3, 3]


def test_augmentation_of_coco() -> None:
    """vision-ttt App. D: sides up to 1333×800; ViT³ Sec. 5.2: 480-800 and crops."""
    steps = transforms('maskrcnn_vittt_s_1x')
    assert list(steps) == [
        *('LoadImageFromFile', 'LoadAnnotations', 'RandomChoiceResize'),
        *('RandomFlip', 'PackDetInputs'),
    ]
    scales = [tuple(scale) for scale in steps['RandomChoiceResize'].scales]
    assert (1333, 800) in scales
    assert max(map(max, scales)) == 1333
    whole, cropped = transforms('maskrcnn_hvit3_t_1x')['RandomChoice'].transforms
    for resize in (whole[0], cropped[-1]):
        assert {min(scale) for scale in resize.scales} == set(range(480, 801, 32))
    assert [step.type for step in cropped].count('RandomCrop') == 1


def test_augmentation_of_ade20k() -> None:
    """App. D: 512×512, 150 classes without the background."""
    cfg, steps = load_config('upernet_vittt_s_160k'), transforms('upernet_vittt_s_160k')
    assert cfg.train_dataloader.dataset.type == 'ADE20KDataset'
    assert steps['RandomCrop'].crop_size == (512, 512)
    assert steps['LoadAnnotations'].reduce_zero_label
    assert cfg.model.decode_head.num_classes == cfg.model.auxiliary_head.num_classes == 150
    assert cfg.model.decode_head.norm_cfg.type == 'SyncBN'


@pytest.mark.parametrize(('size', 'weight'), [('t', 1.0), ('s', 1.5), ('b', 2.0)])
def test_mesa_is_the_same_recipe_with_a_teacher(size: str, weight: float) -> None:
    plain, mesa = (load_config(f'hvit3_{size}_{kind}in1k') for kind in ('', 'mesa_'))
    assert built(f'hvit3_{size}_mesa_in1k')[1].mesa_weight == weight
    assert [e.type for e in mesa.val_evaluator] == ['Accuracy', 'mmvttt.TeacherAccuracy']
    assert mesa.default_hooks.checkpoint.save_best == 'teacher/top1'
    assert mesa.model.backbone == plain.model.backbone
    assert mesa.optim_wrapper == plain.optim_wrapper


@pytest.mark.parametrize('name', one_of_each())
def test_norms_of_the_backbone(name: str) -> None:
    kinds = {type(m).__name__ for m in built(name)[1].backbone.modules()}
    norms = sorted(k for k in kinds if 'Norm' in k and k not in ('LayerNorm', 'ConvNormAct'))
    assert ', '.join(norms) == (recipe_of(name).norms or '')


@pytest.mark.parametrize('name', one_of_each())
def test_rate_and_decay_of_every_tensor(name: str) -> None:
    cfg, model = built(name)
    recipe = recipe_of(name)
    wrapper = build_optim_wrapper(model, dict(cfg.optim_wrapper, type='OptimWrapper'))
    groups = {id(p): g for g in wrapper.optimizer.param_groups for p in g['params']}
    for tensor, parameter in model.named_parameters():
        if tensor.startswith('teacher.'):
            assert id(parameter) not in groups or not parameter.requires_grad
            continue
        group = groups[id(parameter)]
        rate = recipe.lr * recipe.layers ** (13 - layer(tensor))
        if re.search('^t5|_linear_', name) and NEW.search(tensor):
            rate *= 20
        assert group['lr'] == pytest.approx(rate, rel=1e-9), tensor
        decay = 0.0 if SPARED[recipe.spared](tensor, parameter) else recipe.decay
        assert group['weight_decay'] == decay, tensor


def layer(name: str) -> int:
    """0 for embeddings, 1 to 12 for the blocks of a plain backbone in an adapter, 13 for others."""
    if block := re.match(r'backbone\.backbone\.blocks\.(\d+)\.', name):
        return 1 + int(block[1])
    return 0 if re.match(r'backbone\.backbone\.(pos_|patch_|cls_|reg_)', name) else 13


@pytest.mark.parametrize('schedule', RATES)
def test_learning_rate_by_step(schedule: str) -> None:
    length, expected = RATES[schedule]
    names = [n for n in NAMES if recipe_of(n).schedule == schedule]
    schedules = {str(load_config(n).param_scheduler) + str(load_config(n).train_cfg) for n in names}
    assert len(schedules) == 1, 'one schedule, one table'
    curve = rates(load_config(names[0]), length)
    assert max(expected) == len(curve) - 1
    for step, part in expected.items():
        assert curve[step] == pytest.approx(part, rel=1e-7, abs=1e-9), step


def rates(cfg: Config, length: int | None) -> list[float]:
    """The rate of every step of a training with epochs of `length` steps, as parts of 1."""
    epochs = cfg.train_cfg.get('max_epochs')
    steps = epochs * length if epochs else cfg.train_cfg.max_iters
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    by_step, by_epoch = [], []
    for config in cfg.param_scheduler:
        in_epochs = config.get('by_epoch', True)
        built = PARAM_SCHEDULERS.build(
            {'end': epochs if in_epochs else steps, **config},
            default_args=dict(optimizer=optimizer, epoch_length=length),
        )
        whole = in_epochs and not config.get('convert_to_iter_based')
        (by_epoch if whole else by_step).append(built)
    curve = []
    for step in range(1, steps + 1):
        curve.append(optimizer.param_groups[0]['lr'])
        if step == 1:
            # mmengine warns of a schedule that goes before its optimizer.
            optimizer.step()
        for schedule in [*by_step, *(by_epoch if length and step % length == 0 else [])]:
            schedule.step()
    return curve


# How every kind of tensor starts; the first row that fits a name counts. A number is the standard
# deviation of a normal or truncated normal; 'torch' the uniform start of torch's layers, 1/√(3·fan
# in); 'fan-out' the original adapter's rule for convolutions, √(2 / fan out).
STARTS: dict[str, float | str] = {
    r'spatial_prior\..*conv\.weight|spatial_prior\.projections\.\d\.weight': 'fan-out',
    r'ffn\.dwconv\.weight': (2 / 9) ** 0.5,
    r'(^|\.)up\.weight': (2 / (4 * 192)) ** 0.5,
    r'level_embed': 1.0,
    r'(value|output)_proj\.weight': 192**-0.5,
    r'sampling_offsets\.bias': 'rays',
    r'gamma|sampling_offsets\.weight|attention_weights\.weight': 'zeros',
    r'(norm\d?|norms\.\d|bn)\.weight|ln_weight': 'ones',
    r'token_scale|b0|ln_bias|eta_bias': 'zeros',
    r'patch_embed\.proj\.|stem\.\d\.conv\.': 'torch',
    r'conv2d\.|cpe\.|[qk]_conv\.|mlp\.dwconv\.|downsample\.(widen|halve|narrow)\.': 'torch',
    r'pos_embed|\.w[0-3]$': 0.02,
    r'(qkv|proj|fc\d?)\.weight': 0.02,
    r'\.bias$': 'zeros',
}


@pytest.mark.parametrize(
    'name', ['vittt_t_in1k', 'vit3_t_in1k', 'hvit3_t_in1k', 't5_t_in1k_30e', 'maskrcnn_vittt_t_1x']
)
def test_starting_values_of_every_tensor(name: str) -> None:
    cfg = load_config(name)
    init_default_scope(cfg.default_scope)
    remove_checkpoints(cfg.model)
    torch.manual_seed(0)
    # The heads of the detectors are mmdet's.
    model = MODELS.build(cfg.model.backbone if name.startswith('mask') else cfg.model)
    model.init_weights()
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    for tensor, value in tensors.items():
        start = next((s for pattern, s in STARTS.items() if re.search(pattern, tensor)), None)
        assert start is not None, f'{tensor} is in no row'
        if start in ('zeros', 'ones'):
            assert (value == float(start == 'ones')).all(), tensor
        elif start == 'rays':
            # Point p of a head lies p + 1 cells from the centre, in the head's direction.
            reach = value.view(-1, 4, 2).abs().amax(-1)
            torch.testing.assert_close(reach, torch.arange(1.0, 5).expand_as(reach))
        else:
            weight = tensors[tensor.removesuffix('bias') + 'weight'] if '.bias' in tensor else value
            assert_spread(tensor, value, spread(start, weight))


def spread(start: float | str, weight: torch.Tensor) -> float:
    taps = weight[0, 0].numel()
    if start == 'torch':
        # Causal convolutions have all directions in one tensor: (directions, C, taps).
        return (3 * (taps if weight.ndim == 3 else weight[0].numel())) ** -0.5
    return (2 / (len(weight) * taps)) ** 0.5 if start == 'fan-out' else start


def assert_spread(name: str, value: torch.Tensor, expected: float) -> None:
    """Five standard errors of mean and deviation of so many independent numbers."""
    count = value.numel()
    assert value.mean().abs() < 5 * expected / count**0.5, name
    assert value.std().item() == pytest.approx(expected, rel=5 / (2 * count) ** 0.5), name
