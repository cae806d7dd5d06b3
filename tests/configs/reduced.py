"""Backbones of the configs, small enough for a test, and the kinds of their norms."""

from mmengine.config import ConfigDict
from torch import nn

PLAIN = dict(embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=96)
TIMM = dict(embed_dim=64, depth=4, num_heads=2)
STAGES = dict(embed_dims=(16, 32, 48, 64), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))


def reduce_backbone(backbone: ConfigDict) -> list[int]:
    """Shrinks a backbone of four maps, with norms for two small images; returns their channels."""
    backbone.norm_cfg = dict(type='BN')
    if 'backbone' in backbone and backbone.backbone.type == 'mmvttt.TimmViT':
        backbone.backbone.pop('init_cfg')
        backbone.backbone.model_options = TIMM
        return [TIMM['embed_dim']] * 4
    if 'backbone' in backbone:
        backbone.backbone.arch = PLAIN
        return [PLAIN['embed_dims']] * 4
    backbone.arch = STAGES
    return list(STAGES['embed_dims'])


def batch_norms(model: nn.Module) -> set[str]:
    """The kinds of batch norms in a model, by itself or of all processes."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return {type(norm).__name__ for norm in norms}
