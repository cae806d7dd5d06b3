"""The T⁵ configs: 20× for what is new, the freeze protocol, a step from a small ViT."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from mmvttt.convert.inherit import inherit_checkpoint

from .reduced import batch_for, build, reduce_model

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


def classifier(name: str = 't5_t_in1k_30e', **backbone) -> tuple[Config, nn.Module]:
    cfg = reduce_model(Config.fromfile(CONFIGS / f'{name}.py'))
    cfg.model.backbone.update(backbone)
    return cfg, build(cfg)


def step(cfg: Config, model: nn.Module) -> dict[str, float]:
    """One step at full rates; the rate of every parameter by name."""
    optim = build_optim_wrapper(model, cfg.optim_wrapper)
    batch = model.train().data_preprocessor(batch_for(cfg, (64, 64)), training=True)
    losses = model(**batch, mode='loss')
    optim.update_params(model.parse_losses(losses)[0])
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: g['lr'] for g in optim.optimizer.param_groups for p in g['params']}


@pytest.mark.parametrize('name', ['t5_t_in1k_30e', 't5plus_t_in1k_30e'])
def test_what_is_new_learns_20_times_as_fast(name: str, tmp_path: Path) -> None:
    cfg, model = classifier(name)
    source = VisionTransformer(64, 16, embed_dim=64, depth=4, num_heads=2, mlp_ratio=1.5)
    torch.save(source.state_dict(), tmp_path / 'vit.pth')
    inherit_checkpoint(tmp_path / 'vit.pth', tmp_path / 't5.pth')
    weights = torch.load(tmp_path / 't5.pth', weights_only=True)['state_dict']
    # As load_from does.
    report = model.load_state_dict(weights, strict=False)
    new = {f'backbone.{name}' for name in model.backbone.new_parameters()}
    assert (set(report.missing_keys), report.unexpected_keys) == (new, [])
    assert model.backbone.blocks[0].mixer.options.neighborhood == (5 if 'plus' in name else None)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rates = step(cfg, model)
    assert {n: rates[n] for n in rates} == {
        n: pytest.approx(8e-4 if n in new else 4e-5) for n, _ in model.named_parameters()
    }
    assert not [n for n, p in model.named_parameters() if torch.equal(p, before[n])]


def test_the_freeze_protocol_of_tab_1() -> None:
    cfg, model = classifier(only_new=True)
    cfg.optim_wrapper.paramwise_cfg.custom_keys = dict(head=dict(lr_mult=0))
    new = {f'backbone.{name}' for name in model.backbone.new_parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step(cfg, model)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == new


def test_bad_rates_are_named() -> None:
    cfg, model = classifier()
    cfg.optim_wrapper.paramwise_cfg.new_lr_mult = 0
    with pytest.raises(ValueError, match='new_lr_mult=0'):
        build_optim_wrapper(model, cfg.optim_wrapper)
    softmax = dict(inner=dict(type='SoftmaxAttention'), locality=None)
    cfg, model = classifier(mixer=softmax)
    with pytest.raises(ValueError, match=r'new_lr_mult=.*names none'):
        build_optim_wrapper(model, cfg.optim_wrapper)
    cfg.optim_wrapper.paramwise_cfg.new_lr_mult = 1
    rates = {group['lr'] for group in build_optim_wrapper(model, cfg.optim_wrapper).param_groups}
    assert rates == {cfg.optim_wrapper.optimizer.lr}
