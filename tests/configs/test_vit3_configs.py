"""The ViT³ and H-ViT³ configs: counts and recipes of the paper; a reduced classifier steps."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmpretrain.structures import DataSample
from torch import nn

from mmvttt.registry import MODELS

from .reduced import PLAIN, STAGES, batch_norms

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
CLASSIFIERS = sorted(CONFIGS.glob('*vit3_*_in1k.py'))
SIZES = 'tsb'


def build(name: str) -> tuple[Config, nn.Module]:
    """A config and its model, without memory for the weights."""
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        return cfg, MODELS.build(cfg.model)


def millions(model: nn.Module) -> float:
    return sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6


def test_every_config_of_the_list_is_there() -> None:
    names = {path.stem for path in CONFIGS.glob('*vit3*.py')}
    for size in SIZES:
        assert names >= {
            f'maskrcnn_hvit3_{size}_1x',
            f'maskrcnn_hvit3_{size}_3x',
            f'maskrcnn_vit3_{size}_1x',
            f'upernet_hvit3_{size}_160k',
            f'upernet_vit3_{size}_160k',
            f'vit3_{size}_in1k',
            f'hvit3_{size}_in1k',
            f'hvit3_{size}_mesa_in1k',
        }


@pytest.mark.parametrize('path', CLASSIFIERS, ids=lambda p: p.stem)
def test_reduced_classifier_steps(path: Path) -> None:
    cfg = Config.fromfile(path)
    init_default_scope('mmpretrain')
    stages = cfg.model.backbone.type == 'mmvttt.HViT3'
    # Without stochastic depth: in one step it would leave whole branches without a gradient.
    cfg.model.backbone.update(arch=STAGES if stages else PLAIN, drop_path_rate=0.0)
    cfg.model.head.update(in_channels=64, num_classes=10)
    cfg.data_preprocessor.num_classes = 10
    torch.manual_seed(0)
    model = MODELS.build(dict(cfg.model, data_preprocessor=cfg.data_preprocessor))
    model.init_weights()
    # The step is in fp32: a bare loop has no autocast around the loss.
    optim = build_optim_wrapper(model, dict(cfg.optim_wrapper, type='OptimWrapper'))
    decayed = {id(p) for g in optim.param_groups if g['weight_decay'] for p in g['params']}
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    # None on biases and 1-D parameters.
    assert all((id(p) in decayed) == (p.dim() > 1) for _, p in trained)
    before = {n: p.detach().clone() for n, p in trained}
    if hasattr(model, 'distilling'):
        model.distilling = True
    model.train()
    samples = [DataSample().set_gt_label(i) for i in range(4)]
    batch = dict(inputs=torch.randint(0, 255, (4, 3, 64, 64)).byte(), data_samples=samples)
    losses = model(**model.data_preprocessor(batch, training=True), mode='loss')
    assert ('loss_mesa' in losses) == ('mesa' in path.stem)
    optim.update_params(model.parse_losses(losses)[0])
    still = [n for n, p in trained if torch.equal(p, before[n])]
    assert not still
    with torch.no_grad():
        results = model.eval()(**model.data_preprocessor(batch), mode='predict')
    assert [len(r.pred_score) for r in results] == [10] * 4


@pytest.mark.parametrize(
    ('name', 'params', 'drop_path'),
    [
        ('vit3_t', 6.1494, 0.0),
        ('vit3_s', 23.7994, 0.1),
        ('vit3_b', 90.0559, 0.4),
        ('hvit3_t', 28.7036, 0.2),
        ('hvit3_s', 54.3621, 0.4),
        ('hvit3_b', 94.3693, 0.6),
    ],
)
def test_classification_recipe(name: str, params: float, drop_path: float) -> None:
    """Sec. 5.1: 300 epochs, 20 of warm-up, AdamW 4e-3 at 4096 images, weight decay 0.05."""
    cfg, model = build(f'{name}_in1k')
    assert round(millions(model), 4) == params
    assert cfg.model.backbone.get('drop_path_rate', 0.0) == drop_path
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 4e-3, 0.05)
    assert cfg.optim_wrapper.clip_grad.max_norm == 5.0
    assert cfg.auto_scale_lr.base_batch_size == 4096
    assert cfg.train_cfg.max_epochs == 300
    assert cfg.auto_scale_lr.enable
    assert cfg.optim_wrapper.type == 'mmvttt.AmpOptimWrapper'
    (schedule,) = cfg.param_scheduler
    assert schedule == dict(type='mmvttt.WarmupCosineLR', convert_to_iter_based=True)
    # Its own default is the recipe's decay of 0.9996 at 4096 images.
    assert cfg.get('custom_hooks', []) == ([dict(type='mmvttt.EMAHook')] if name[0] == 'h' else [])


@pytest.mark.parametrize(('size', 'weight'), [('t', 1.0), ('s', 1.5), ('b', 2.0)])
def test_mesa_is_the_same_recipe_with_a_teacher(size: str, weight: float) -> None:
    plain, model = build(f'hvit3_{size}_in1k')
    mesa, taught = build(f'hvit3_{size}_mesa_in1k')
    assert taught.mesa_weight == weight
    assert millions(taught) == millions(model)
    assert [hook.type for hook in mesa.custom_hooks] == ['mmvttt.MESAHook']
    assert [e.type for e in mesa.val_evaluator] == ['Accuracy', 'mmvttt.TeacherAccuracy']
    assert mesa.default_hooks.checkpoint.save_best == 'teacher/top1'
    assert mesa.model.backbone == plain.model.backbone
    assert mesa.optim_wrapper == plain.optim_wrapper


@pytest.mark.parametrize(
    ('schedule', 'epochs', 'steps', 'drop_paths'),
    [('1x', 12, [8, 11], (0.1, 0.1, 0.1)), ('3x', 36, [27, 33], (0.3, 0.4, 0.6))],
)
def test_detection_recipe(
    schedule: str, epochs: int, steps: list[int], drop_paths: tuple[float, ...]
) -> None:
    """Sec. 5.2: AdamW 2e-4, weight decay 0.05 but on norms, multi-scale 480-800 and crops."""
    for size, params, drop_path in zip(SIZES, (28.19, 53.85, 93.73), drop_paths, strict=True):
        cfg, model = build(f'maskrcnn_hvit3_{size}_{schedule}')
        assert round(millions(model.backbone), 2) == params
        assert cfg.model.backbone.drop_path_rate == drop_path
        assert cfg.train_cfg.max_epochs == cfg.param_scheduler[-1].end == epochs
        assert cfg.param_scheduler[-1].milestones == steps
        optimizer = cfg.optim_wrapper.optimizer.to_dict()
        assert optimizer == dict(type='AdamW', lr=2e-4, weight_decay=0.05)
        assert cfg.optim_wrapper.type == 'mmvttt.AmpOptimWrapper'
        assert cfg.optim_wrapper.constructor == 'DefaultOptimWrapperConstructor'
        assert cfg.optim_wrapper.paramwise_cfg == dict(norm_decay_mult=0.0)
        assert cfg.auto_scale_lr.to_dict() == dict(enable=True, base_batch_size=32)
        assert cfg.param_scheduler[0].end == 1000
        assert batch_norms(model.backbone) == {'BatchNorm2d'}
        pipeline = {t.type: t for t in cfg.train_dataloader.dataset.pipeline}
        whole, cropped = pipeline['RandomChoice'].transforms
        for resize in (whole[0], cropped[-1]):
            assert {min(s) for s in resize.scales} == set(range(480, 801, 32))
        assert [t.type for t in cropped].count('RandomCrop') == 1


@pytest.mark.parametrize(
    ('size', 'drop_path', 'params'), [('t', 0.2, 58), ('s', 0.4, 84), ('b', 0.5, 124)]
)
def test_segmentation_recipe(size: str, drop_path: float, params: int) -> None:
    """Sec. 5.3: UperNet, 160k iterations, AdamW 6e-5, weight decay 0.01."""
    cfg, model = build(f'upernet_hvit3_{size}_160k')
    assert cfg.model.backbone.drop_path_rate == drop_path
    assert cfg.train_cfg.max_iters == 160000
    optimizer = cfg.optim_wrapper.optimizer.to_dict()
    assert optimizer == dict(type='AdamW', lr=6e-5, weight_decay=0.01)
    assert (cfg.optim_wrapper.type == 'mmvttt.AmpOptimWrapper') == (size == 't')
    assert batch_norms(model.backbone) == {'BatchNorm2d'}
    optim = build_optim_wrapper(model, dict(cfg.optim_wrapper, type='OptimWrapper'))
    names = {id(p): n for n, p in model.named_parameters()}
    groups = {names[id(p)]: g for g in optim.optimizer.param_groups for p in g['params']}
    norms = {
        f'{name}.{kind}'
        for name, module in model.backbone.named_modules(prefix='backbone')
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d)
        for kind in ('weight', 'bias')
    }
    assert {n for n, g in groups.items() if not g['weight_decay']} == norms
    assert sum('.bn.' in n for n in set(groups) - norms) == 26
    # Tab. 9 counts without the auxiliary head.
    assert round(millions(model) - millions(model.auxiliary_head)) == params


@pytest.mark.parametrize(('size', 'drop_path'), [('t', 0.1), ('s', 0.2), ('b', 0.3)])
def test_plain_models_take_the_recipe_of_vittt(size: str, drop_path: float) -> None:
    for task in ('maskrcnn_{}_{}_1x', 'upernet_{}_{}_160k'):
        ours = Config.fromfile(CONFIGS / f'{task.format("vit3", size)}.py')
        vittt = Config.fromfile(CONFIGS / f'{task.format("vittt", size)}.py')
        assert ours.model.backbone.backbone.type == 'mmvttt.ViT3'
        assert ours.model.backbone.backbone.drop_path_rate == drop_path
        ours.model.backbone.backbone = vittt.model.backbone.backbone
        assert ours.to_dict() == vittt.to_dict()
