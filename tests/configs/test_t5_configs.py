"""The T⁵ configs: the paper's fine-tuning recipe, 20× for what is new, a step from a small ViT."""

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATA_SAMPLERS, init_default_scope
from mmpretrain.structures import DataSample
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from mmvttt.models.inherit import inherit_checkpoint
from mmvttt.registry import MODELS

from .reduced import PLAIN
from .test_configs import det_batch, detector

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
CLASSIFIERS = sorted(CONFIGS.glob('t5*_in1k_30e.py'))


def classifier(path: Path, **backbone) -> tuple[Config, nn.Module]:
    cfg = Config.fromfile(path)
    init_default_scope('mmpretrain')
    cfg.model.backbone.update(arch=PLAIN, img_size=64, **backbone)
    cfg.model.head.update(in_channels=64, num_classes=10)
    cfg.data_preprocessor.num_classes = 10
    torch.manual_seed(0)
    return cfg, MODELS.build(dict(cfg.model, data_preprocessor=cfg.data_preprocessor))


def step(cfg: Config, model: nn.Module) -> dict[str, float]:
    """One step at full rates; the rate of every parameter by name."""
    optim = build_optim_wrapper(model, cfg.optim_wrapper)
    samples = [DataSample().set_gt_label(i) for i in range(4)]
    batch = dict(inputs=torch.randint(0, 255, (4, 3, 64, 64)).byte(), data_samples=samples)
    losses = model(**model.train().data_preprocessor(batch, training=True), mode='loss')
    optim.update_params(model.parse_losses(losses)[0])
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: g['lr'] for g in optim.optimizer.param_groups for p in g['params']}


def test_every_config_of_the_list_is_there() -> None:
    names = {path.stem for path in CONFIGS.glob('*t5*.py')}
    for size in 'ts':
        assert names >= {
            f't5_{size}_in1k_30e',
            f't5plus_{size}_in1k_30e',
            f'maskrcnn_t5_{size}_1x',
            f'upernet_t5_{size}_160k',
        }


@pytest.mark.parametrize('path', CLASSIFIERS, ids=lambda p: p.stem)
def test_what_is_new_learns_20_times_as_fast(path: Path, tmp_path: Path) -> None:
    cfg, model = classifier(path)
    source = VisionTransformer(64, 16, embed_dim=64, depth=4, num_heads=2, mlp_ratio=1.5)
    source.reset_classifier(10)
    torch.save(source.state_dict(), tmp_path / 'vit.pth')
    inherit_checkpoint(tmp_path / 'vit.pth', tmp_path / 't5.pth')
    weights = torch.load(tmp_path / 't5.pth', weights_only=True)['state_dict']
    # As load_from does.
    report = model.load_state_dict(weights, strict=False)
    new = {f'backbone.{name}' for name in model.backbone.new_parameters()}
    assert (set(report.missing_keys), report.unexpected_keys) == (new, [])
    assert model.backbone.blocks[0].mixer.neighborhood == (5 if 'plus' in path.stem else None)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rates = step(cfg, model)
    assert {n: rates[n] for n in rates} == {
        n: pytest.approx(8e-4 if n in new else 4e-5) for n, _ in model.named_parameters()
    }
    assert not [n for n, p in model.named_parameters() if torch.equal(p, before[n])]


def test_the_freeze_protocol_of_tab_1() -> None:
    cfg, model = classifier(CLASSIFIERS[0], only_new=True)
    cfg.optim_wrapper.paramwise_cfg.custom_keys = dict(head=dict(lr_mult=0))
    new = {f'backbone.{name}' for name in model.backbone.new_parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step(cfg, model)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == new


@pytest.mark.parametrize('path', CLASSIFIERS, ids=lambda p: p.stem)
def test_recipe_of_tab_8(path: Path) -> None:
    cfg = Config.fromfile(path)
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.weight_decay) == ('AdamW', 1e-8)
    assert optimizer.lr == pytest.approx(2e-5 * cfg.auto_scale_lr.base_batch_size / 512)
    assert cfg.optim_wrapper.get('clip_grad') is None
    assert cfg.train_cfg.max_epochs == 30
    (schedule,) = cfg.param_scheduler
    assert schedule == dict(type='mmvttt.WarmupCosineLR', warmup_ratio=5 / 30)
    assert cfg.model.backbone.get('drop_path_rate', 0) == 0


@pytest.mark.parametrize('path', CLASSIFIERS, ids=lambda p: p.stem)
def test_augmentation_is_repeated(path: Path) -> None:
    """A third of the images, three times each: facts of DeiT's sampler, on 12 images."""
    cfg = Config.fromfile(path)
    init_default_scope('mmpretrain')
    sampler = DATA_SAMPLERS.build(
        cfg.train_dataloader.sampler, default_args=dict(dataset=range(12))
    )
    assert sorted(Counter(sampler).values()) == [3, 3, 3, 3]


@pytest.mark.parametrize(('value', 'named'), [(0, 'new_lr_mult=0'), ('20', "new_lr_mult='20'")])
def test_bad_rates_are_named(value: object, named: str) -> None:
    cfg, model = classifier(CLASSIFIERS[0])
    cfg.optim_wrapper.paramwise_cfg.new_lr_mult = value
    with pytest.raises((TypeError, ValueError), match=named):
        build_optim_wrapper(model, cfg.optim_wrapper)


def test_a_model_without_new_parameters_has_no_use_for_the_rate() -> None:
    softmax = dict(inner=dict(type='SoftmaxAttention'), locality=None)
    cfg, model = classifier(CLASSIFIERS[0], mixer=softmax)
    with pytest.raises(ValueError, match=r'new_lr_mult.*names none'):
        build_optim_wrapper(model, cfg.optim_wrapper)


def test_a_detector_takes_images_of_different_sizes() -> None:
    """Padded to the larger one and to nothing else: 225×333 is no multiple of a patch."""
    path = CONFIGS / 'maskrcnn_t5_t_1x.py'
    cfg = detector(path)
    cfg.data_preprocessor.pad_size_divisor = 1
    torch.manual_seed(0)
    model = MODELS.build(cfg)
    large, small = det_batch((225, 333)), det_batch((96, 120))
    batch = {key: [large[key][0], small[key][1]] for key in large}
    prepared = model.train().data_preprocessor(copy.deepcopy(batch), training=True)
    assert prepared['inputs'].shape == (2, 3, 225, 333)
    loss, _ = model.parse_losses(model(**prepared, mode='loss'))
    loss.backward()
    new = {f'backbone.backbone.{n}' for n in model.backbone.backbone.new_parameters()}
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert loss.isfinite()
    assert all(grads[name].abs().sum() > 0 for name in new)
    with torch.no_grad():
        found = model.eval()(**model.data_preprocessor(batch), mode='predict')
    masks = [tuple(result.pred_instances.masks.shape[1:]) for result in found]
    assert masks == [(225, 333), (96, 120)]
